"""The commands and the code of the README do what the README says, unchanged."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service import CHAT, Service, await_end, chat_lines, running_mock, running_service

_ROOT = Path(__file__).parents[2]
_README = (_ROOT / "README.md").read_text()
_EXAMPLES = _ROOT / "examples"


def _block(language: str, containing: str) -> str:
    """Return the one block of code that contains these words."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", _README, re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


def _filled(text: str, service: Service, **more: str) -> str:
    given = {
        "http://127.0.0.1:8000/v1": service.base_url,
        "API_KEY": service.account["api_key"],
        "PROJECT_ID": service.account["project_id"],
    }
    # The longest first: FILE_ID is a part of OUTPUT_FILE_ID.
    for name, value in sorted((given | more).items(), key=lambda pair: -len(pair[0])):
        text = text.replace(name, value)
    return text


def _run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_python_runs_as_it_stands(tmp_path: Path) -> None:
    """With a key and a port filled in, it prints a completed batch and its first answer."""
    program = _block("python", "from openai") + _block("python", "client.batches.create")
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        shown = _run(sys.executable, "-c", _filled(program, service), cwd=tmp_path)
    status, answer = shown.splitlines()
    assert status == "completed BatchRequestCounts(completed=20, failed=0, total=20)"
    assert json.loads(answer)["response"]["status_code"] == 200


@pytest.mark.curl
def test_the_curl_commands_run_as_they_stand(tmp_path: Path) -> None:
    """One after the other in the plainest shell, each with the ids that the earlier ones returned."""
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell is not None
    auth, *commands = _block("sh", "curl").replace("\\\n", " ").splitlines()
    ids: dict[str, str] = {}
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        for command in commands:
            output = _run(shell, "-c", _filled(f"{auth}\n{command} -sSf", service, **ids), cwd=_ROOT)
            if "content" in command.split()[-1]:
                break
            answer = json.loads(output)
            if answer["object"] == "batch":
                ended = await_end(service.client(), answer["id"])
                ids |= {"BATCH_ID": ended.id, "OUTPUT_FILE_ID": ended.output_file_id or ""}
            else:
                ids["FILE_ID"] = answer["id"]
    assert len(output.splitlines()) == 62
    assert json.loads(output.splitlines()[0])["error"] is None


def test_a_job_in_one_command(tmp_path: Path) -> None:
    """F4: with scripted answers, since their content does not matter here."""
    _, *arguments = _block("sh", "batchline run").split()
    lines = chat_lines(f"good {n}" for n in range(10))
    (tmp_path / "input.jsonl").write_bytes(lines)
    arguments[1] = "input.jsonl"
    with running_mock() as mock:
        batchline = Path(sys.executable).with_name("batchline")
        _run(batchline, *arguments, "--upstream-url", mock.url, cwd=tmp_path)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {one["custom_id"] for one in answers} == {f"line-{n}" for n in range(10)}
    assert not (tmp_path / "errors.jsonl").exists()


def test_the_demo_runs_a_batch_through_the_real_model(tmp_path: Path) -> None:
    """`make demo` with fewer questions prints answers of the embedded model and the errors by code."""
    lines = (_EXAMPLES / "capitals.jsonl").read_text().splitlines()
    questions = [line for line in lines if "capital-of-" in line]
    failing = [line for line in lines if "capital-of-" not in line]
    assert (len(questions), len(failing)) == (60, 4)
    first = next(n for n, line in enumerate(questions) if "capital-of-Norway" in line)
    (tmp_path / "few.jsonl").write_text("\n".join(questions[first : first + 2] + failing))
    shown = _run(sys.executable, _EXAMPLES / "demo.py", "few.jsonl", cwd=tmp_path)
    assert "  +  Norway        Oslo          The capital of Norway is Oslo." in shown
    assert re.search(r"\d of 2 are right", shown)
    assert "  3  invalid_request_error" in shown
    assert "  1  context_length_exceeded" in shown
    answers = [
        json.loads(line)["response"]["body"] for line in (tmp_path / "demo-output.jsonl").read_text().splitlines()
    ]
    assert {answer["model"] for answer in answers} == {"smollm2-135m-instruct"}
    assert all(answer["usage"]["completion_tokens"] > 0 for answer in answers)


def test_the_example_is_what_its_table_of_answers_expects() -> None:
    lines = [json.loads(line) for line in (_EXAMPLES / "capitals.jsonl").read_text().splitlines()]
    capitals = json.loads((_EXAMPLES / "capitals.json").read_text())
    assert {line["custom_id"] for line in lines} >= set(capitals)
    assert len(capitals) == 60
    assert {line["url"] for line in lines} == {CHAT}
