"""`batchline check`: every fault of a file, its tokens, cost and time (G5)."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchline.cli import main
from tests.support.run_process import Tenant
from tests.support.scripted_server import Asked, answering, reply
from tests.support.service import chat_lines, running_service

_MODEL = {
    "model": "small",
    "lines": 2,
    "enabled": True,
    "input_tokens": 1200,
    "output_tokens_at_most": None,
    "cost_at_most": 0.5,
    "estimated": True,
}
_VALID = {
    "object": "batch.check",
    "valid": True,
    "errors": None,
    "lines": 2,
    "models": [_MODEL],
    "duplicates": 1,
    "seconds": {"low": 3, "high": 90},
}
_INVALID = _VALID | {
    "valid": False,
    "errors": {
        "object": "list",
        "data": [{"code": "c", "message": "Line 2 is not valid JSON", "line": 2, "param": None}],
    },
    "models": [],
    "duplicates": 0,
    "seconds": None,
}


def _check(tmp_path: Path, found: object, *more: str) -> tuple[Result, list[Asked]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(chat_lines(["a", "b"]))
    with answering(
        reply(200, b'{"id": "file-1"}'), reply(200, json.dumps(found).encode()), reply(200, b'{"id": "file-1"}')
    ) as server:
        environment = {"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"}
        result = CliRunner(env=environment).invoke(main, ["check", str(path), *more])
    return result, server.asked


def test_a_valid_file_is_0_with_tokens_cost_and_time(tmp_path: Path) -> None:
    result, asked = _check(tmp_path, _VALID)
    assert result.exit_code == 0, result.output
    verdict, duplicates, heads, row, note = result.stdout.splitlines()
    assert verdict == f"{tmp_path / 'in.jsonl'}: valid; 2 lines; about 3.0 s to 1:30"
    assert duplicates == "  1 line repeats the request of another line"
    assert heads.split("  ")[0] == "model"
    assert row.split() == ["small", "2", "yes", "~1,200", "-", "0.5"]
    assert note == "Tokens marked with ~ are estimated from the size of the requests."
    assert [each.head.splitlines()[0].rsplit(" ", 1)[0] for each in asked] == [
        "POST /v1/files",
        "POST /v1/batches/check",
        "DELETE /v1/files/file-1",
    ]
    assert json.loads(asked[1].body) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }


def test_an_invalid_file_is_1_and_its_faults_are_told_by_line(tmp_path: Path) -> None:
    result, asked = _check(tmp_path, _INVALID)
    assert result.exit_code == 1
    assert result.stdout == f"{tmp_path / 'in.jsonl'}: not valid, 1 fault; 2 lines\n  line 2: is not valid JSON\n"
    assert asked[-1].head.startswith("DELETE ")


@pytest.mark.parametrize("suffix", [".csv", ".TSV", ".parquet"])
def test_a_table_is_wrong_usage(tmp_path: Path, suffix: str) -> None:
    """Its first line is no JSON, which says nothing to a person who wants to check a table."""
    path = tmp_path / f"cities{suffix}"
    path.write_text("city\nParis\n")
    result = CliRunner().invoke(main, ["check", str(path)])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert "is a table, and check takes JSON lines. A table is checked by: batchline run FILE --prompt" in said


def test_json_is_what_the_server_found(tmp_path: Path) -> None:
    result, _ = _check(tmp_path, _VALID, "--json")
    assert json.loads(result.stdout) == _VALID


def test_the_file_is_deleted_also_if_the_check_fails(tmp_path: Path) -> None:
    """G5: nothing is stored."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(chat_lines(["a"]))
    refused = b'{"error": {"message": "No", "type": "t", "code": null, "param": null}}'
    with answering(reply(200, b'{"id": "file-1"}'), reply(400, refused), reply(200, b'{"id": "file-1"}')) as server:
        environment = {"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"}
        result = CliRunner(env=environment).invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert f"{server.url} says: No." in result.stderr
    assert server.asked[-1].head.startswith("DELETE /v1/files/file-1 ")


def test_a_service_checks_a_file_and_keeps_nothing(tenant: Tenant, source: Path) -> None:
    runner = CliRunner(env=tenant.environment())
    result = runner.invoke(main, ["check", str(source)])
    assert result.exit_code == 0, result.output
    verdict, heads, row, note = result.stdout.splitlines()
    assert verdict == f"{source}: valid; 20 lines"
    assert heads.split("  ")[0] == "model"
    assert row.split()[:3] == ["m", "20", "yes"]
    assert note == "Tokens marked with ~ are estimated from the size of the requests."
    source.write_bytes(source.read_bytes() + b"{nope\n")
    broken = runner.invoke(main, ["check", str(source)])
    assert (broken.exit_code, broken.stdout.splitlines()[1]) == (1, "  line 21: is not valid JSON")
    assert not json.loads(runner.invoke(main, ["check", str(source), "--json"]).stdout)["valid"]
    assert tenant.batches() == []
    assert tenant.service.client(tenant.account).files.list().data == []


def _naming(model: str, line: bytes) -> bytes:
    request = json.loads(line)
    request["body"]["model"] = model
    return json.dumps(request).encode() + b"\n"


@pytest.mark.rule("G5", "A check needs no data folder, and says which models the embedded model does not answer to.")
def test_a_check_without_a_data_folder_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = tmp_path / "in.jsonl"
    lines = chat_lines(["a", "b"]).splitlines(keepends=True)
    source.write_bytes(_naming("any", lines[0]) + _naming("another", lines[1]))
    runner = CliRunner(env={"TMPDIR": str(temporary), "BATCHLINE_PORT": "0"})
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", None)
        result = runner.invoke(main, ["check", "in.jsonl", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(model["model"], model["enabled"]) for model in found["models"]] == [("another", False), ("any", True)]
    assert sorted(tmp_path.iterdir()) == [source, temporary]
    assert list(temporary.iterdir()) == []


@pytest.mark.rule("G5", "Tokens are counted by the tokenizer of an upstream that has one.")
def test_a_llama_server_counts_the_tokens(tmp_path: Path, llama_url: str) -> None:
    """All of a few lines, and a sample of many."""
    path = tmp_path / "in.jsonl"
    with running_service(tmp_path, llama_url) as service:
        environment = Tenant(service, service.account).environment()

        def found(lines: int) -> Any:
            path.write_bytes(chat_lines(f"How many tokens has line {n}?" for n in range(lines)))
            result = CliRunner(env=environment).invoke(main, ["check", str(path), "--json"])
            assert result.exit_code == 0, result.output
            [model] = json.loads(result.stdout)["models"]
            return model

        few, many = found(20), found(200)
        assert (few["estimated"], few["counted_lines"]) == (False, 20)
        assert (many["estimated"], 16 <= many["counted_lines"] <= 32) == (True, True)
        assert many["input_tokens"] == pytest.approx(few["input_tokens"] * 10, rel=0.1)
        shown = CliRunner(env=environment).invoke(main, ["check", str(path)]).stdout
        assert f"estimated from {many['counted_lines']} lines that the model's tokenizer counted" in shown
        assert json.loads(service.command("usage", "--json", "--by", "model")) == [], "nothing ran"
