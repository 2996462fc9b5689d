"""Runs a whole batch through the embedded model and shows the results: `make demo` runs this."""

import json
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTPUT, ERRORS = Path("demo-output.jsonl"), Path("demo-errors.jsonl")
BATCHLINE = Path(sys.executable).parent / "batchline"
SOME_FAILED = 3

SNIPPETS = """
Try it yourself: start the service with `make serve`, and in another terminal run

  curl http://127.0.0.1:8000/v1/chat/completions \\
    -H "authorization: Bearer {api_key}" \\
    -d '{{"model": "any", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

or, with the official client (pip install openai),

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="{api_key}")
  file = client.files.create(file=open("examples/capitals.jsonl", "rb"), purpose="batch")
  batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
  print(client.batches.retrieve(batch.id))

The description of the API, where you can try it: http://127.0.0.1:8000/docs
"""


def main(source: Path) -> None:
    lines = records(source)
    print(f"Sending the {len(lines)} lines of {source.name} through the embedded model.", flush=True)
    ran = subprocess.run([BATCHLINE, "run", source, "-o", OUTPUT, "-e", ERRORS], check=False)
    if ran.returncode not in {0, SOME_FAILED}:
        sys.exit(ran.returncode)
    show_answers(lines, records(OUTPUT))
    show_errors(records(ERRORS))
    print(f"\nThe results are in {OUTPUT} and {ERRORS}; the data of the service is in batchline-data.")
    print(SNIPPETS.format(**new_key()), end="")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show_answers(lines: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    capitals: dict[str, str] = json.loads((HERE / "capitals.json").read_text())
    expected = {line["custom_id"]: capitals[line["custom_id"]] for line in lines if line["custom_id"] in capitals}
    answers = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in output}
    right = 0
    print()
    for name, capital in expected.items():
        answer = " ".join(answers.get(name, "").split())
        is_right = plain(capital) in plain(answer)
        right += is_right
        print(f"  {'+' if is_right else '-'}  {name.removeprefix('capital-of-'):<13} {capital:<13} {answer[:80]}")
    print(f"\n{right} of {len(expected)} are right. The model is very small; it only shows how batchline works.")


def show_errors(errors: list[dict[str, Any]]) -> None:
    codes = Counter(one["error"]["code"] for one in errors)
    print(f"\n{len(errors)} lines fail on purpose:")
    for code, count in codes.most_common():
        print(f"  {count}  {code}")
        for one in errors:
            if one["error"]["code"] == code:
                print(f"       {one['custom_id']}: {one['error']['message'][:100]}")


def new_key() -> dict[str, str]:
    made = subprocess.run(
        [BATCHLINE, "keys", "create", "--project", "demo", "--json"], check=True, capture_output=True, text=True
    )
    key: dict[str, str] = json.loads(made.stdout)
    return key


def plain(text: str) -> str:
    """Return a text without accents and in lower case: Bogotá becomes bogota."""
    return unicodedata.normalize("NFD", text).encode("ascii", "ignore").decode().lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / "capitals.jsonl")
