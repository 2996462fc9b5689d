"""Programs that read the results of a batch or make one like it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from batchline.console.programs import programs_of
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus, Hold, Reuse
from tests.console.conftest import Console
from tests.support.service import CHAT, PATIENCE, await_end, chat_lines, submit

_HOSTILE = "it's \"$HOME\" `id` \\(1) ${x} \u202e 👩 </script>\n'''"


def _batch(**fields: object) -> Batch:
    made = {"id": "batch_1", "project_id": "p", "key_id": "k", "endpoint": CHAT, "input_file_id": "file-1"}
    rest = {"metadata": b"{}", "status": BatchStatus.COMPLETED, "created_at": 0, "expires_at": 1}
    return Batch(**(made | rest | fields))  # type: ignore[arg-type]


def test_every_program_repeats_the_options_of_the_batch() -> None:
    batch = _batch(
        metadata=json.dumps({"name": "report"}).encode(),
        hold=Hold.OFF,
        reuse=next(iter(Reuse)),
        max_cost=1_500_000_000,
        output_lifetime=86_400,
    )
    for program in programs_of(batch, base_url="http://x"):
        for words in (CHAT, "report", "hold", "reuse", "1.5", "86400", "BATCHLINE_API_KEY"):
            assert words in program.repeat, (program.language, words)
        assert "batch_1" in program.read
        assert "batch_1" not in program.repeat
    for program in programs_of(_batch(), base_url="http://x"):
        assert "metadata" not in program.repeat
        assert '"batchline"' not in program.repeat


@pytest.mark.parametrize("language", ["Python", "curl", "Node"])
def test_hostile_metadata_is_a_literal_of_the_language(language: str, tmp_path: Path) -> None:
    batch = _batch(metadata=json.dumps({_HOSTILE: _HOSTILE}).encode())
    [program] = [each for each in programs_of(batch, base_url="http://x") if each.language == language]
    if language == "Python":
        compile(program.repeat, "program", "exec")
        compile(program.read, "program", "exec")
    elif language == "curl":
        assert subprocess.run(["sh", "-n"], input=program.repeat.encode(), check=True).returncode == 0
    elif node := shutil.which("node"):
        path = tmp_path / "program.mjs"
        path.write_text(program.repeat)
        subprocess.run([node, "--check", path], check=True)


@pytest.mark.parametrize("language", ["Python", "curl"])
def test_a_program_makes_the_batch_again_and_saves_its_results(console: Console, tmp_path: Path, language: str) -> None:
    if language == "curl" and not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("curl or jq is not installed")
    client: OpenAI = console.service.client()
    lines = chat_lines(["one", "two"])
    first = await_end(client, submit(client, lines).id)
    (tmp_path / "input.jsonl").write_bytes(lines)
    batch = _batch(id=first.id, metadata=json.dumps({"name": _HOSTILE}).encode(), hold=Hold.OFF)
    made = programs_of(batch, base_url=f"http://127.0.0.1:{console.port}")
    [program] = [each for each in made if each.language == language]
    command = ["sh", "-c"] if language == "curl" else [sys.executable, "-c"]
    for written in (program.read, program.repeat):
        text = written.replace("YOUR KEY", console.key).replace("sleep 10", "sleep 0.05").replace("(10)", "(0.05)")
        (tmp_path / "output.jsonl").unlink(missing_ok=True)
        environment = os.environ | {"BATCHLINE_API_KEY": console.key}
        subprocess.run([*command, text], cwd=tmp_path, env=environment, check=True, timeout=PATIENCE)
        assert len((tmp_path / "output.jsonl").read_bytes().splitlines()) == 2
    [newest] = client.batches.list(limit=1).data
    assert newest.metadata == {"name": _HOSTILE}
