"""Writes programs that read the results of a batch, or make one like it: for curl, Python and Node.

The texts in them come from clients, so each is written as a literal of its language.
"""

from json import dumps
from typing import Any

from msgspec import Struct

from batchline.console.text import metadata_of, shell
from batchline.domain.money import NANO
from batchline.domain.records import Batch

_WINDOW = "24h"


class Program(Struct, frozen=True, kw_only=True):
    """The programs in one language."""

    language: str
    read: str
    """It saves the results of the batch."""
    repeat: str
    """It makes a batch with the same options, waits for its end and saves its results."""


def programs_of(batch: Batch, *, base_url: str) -> list[Program]:
    """Return programs about a batch. Each takes the key from the environment variable BATCHLINE_API_KEY."""
    options = _options_of(batch)
    return [
        _curl(batch.id, options, base_url=f"{base_url}/v1"),
        _python(batch.id, options, base_url=f"{base_url}/v1"),
        _node(batch.id, options, base_url=f"{base_url}/v1"),
    ]


def _options_of(batch: Batch) -> dict[str, Any]:
    """Return the body of a create like that of a batch, without the input file."""
    options: dict[str, Any] = {"endpoint": batch.endpoint, "completion_window": _WINDOW}
    if metadata := metadata_of(batch.metadata):
        options["metadata"] = metadata
    if batch.output_lifetime is not None:
        options["output_expires_after"] = {"anchor": "created_at", "seconds": batch.output_lifetime}
    extension: dict[str, Any] = {}
    if batch.hold is not None:
        extension["hold"] = True
    if batch.reuse is not None:
        extension["reuse"] = True
    if batch.max_cost is not None:
        extension["max_cost"] = batch.max_cost / NANO
    return options | ({"batchline": extension} if extension else {})


def _curl(batch_id: str, options: dict[str, Any], *, base_url: str) -> Program:
    setup = f"""export BATCHLINE_API_KEY="YOUR KEY"
url={shell(base_url)}
auth="authorization: Bearer $BATCHLINE_API_KEY"
"""
    save = """file=$(curl -sf "$url/batches/$batch" -H "$auth" | jq -r '.output_file_id // empty')
[ -z "$file" ] || curl -sf "$url/files/$file/content" -H "$auth" -o output.jsonl"""
    read = f"""batch={batch_id}
curl -sf "$url/batches/$batch" -H "$auth" | jq '.status, .request_counts'
"""
    create = f"""input=$(curl -sf "$url/files" -H "$auth" -F purpose=batch -F file=@input.jsonl | jq -r .id)
batch=$(jq -n --arg input "$input" {shell(f"{{input_file_id: $input}} + {dumps(options)}")} |
  curl -sf "$url/batches" -H "$auth" -H "content-type: application/json" -d @- | jq -r .id)
while status=$(curl -sf "$url/batches/$batch" -H "$auth" | jq -re .status); do
  case $status in completed|failed|expired|cancelled) break ;; esac
  sleep 10
done
"""
    return Program(language="curl", read=f"{setup}{read}{save}", repeat=f"{setup}{create}{save}")


def _python(batch_id: str, options: dict[str, Any], *, base_url: str) -> Program:
    imports = "import os\n\nfrom openai import OpenAI\n"
    setup = f'\nclient = OpenAI(base_url={base_url!r}, api_key=os.environ["BATCHLINE_API_KEY"])\n'
    save = """if batch.output_file_id:
    client.files.content(batch.output_file_id).write_to_file("output.jsonl")"""
    read = f'batch = client.batches.retrieve("{batch_id}")\nprint(batch.status, batch.request_counts)\n'
    named = {name: options[name] for name in ("endpoint", "completion_window", "metadata") if name in options}
    extra = {name: value for name, value in options.items() if name not in named}
    arguments = [
        f"    {name}={value!r},\n" for name, value in (named | ({"extra_body": extra} if extra else {})).items()
    ]
    create = f"""with open("input.jsonl", "rb") as lines:
    file = client.files.create(file=lines, purpose="batch")
batch = client.batches.create(
    input_file_id=file.id,
{"".join(arguments)})
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(10)
    batch = client.batches.retrieve(batch.id)
"""
    timed = imports.replace("import os\n", "import os\nimport time\n")
    return Program(language="Python", read=f"{imports}{setup}{read}{save}", repeat=f"{timed}{setup}{create}{save}")


def _node(batch_id: str, options: dict[str, Any], *, base_url: str) -> Program:
    setup = f"""import fs from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({{ baseURL: {dumps(base_url)}, apiKey: process.env.BATCHLINE_API_KEY }});
"""
    save = """if (batch.output_file_id) {
  const results = await client.files.content(batch.output_file_id);
  fs.writeFileSync("output.jsonl", await results.text());
}"""
    read = f"""const batch = await client.batches.retrieve("{batch_id}");
console.log(batch.status, batch.request_counts);
"""
    fields = "".join(f"  {name}: {dumps(value)},\n" for name, value in options.items())
    create = f"""const lines = fs.createReadStream("input.jsonl");
const file = await client.files.create({{ file: lines, purpose: "batch" }});
let batch = await client.batches.create({{
  input_file_id: file.id,
{fields}}});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {{
  await new Promise((resolve) => setTimeout(resolve, 10_000));
  batch = await client.batches.retrieve(batch.id);
}}
"""
    return Program(language="Node", read=f"{setup}{read}{save}", repeat=f"{setup}{create}{save}")
