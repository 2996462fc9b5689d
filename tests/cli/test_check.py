"""`batchline check`: every fault of a file, its tokens, cost and time (G5)."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from batchline.cli import main
from tests.support.scripted_server import Asked, answering, reply
from tests.support.service import chat_lines

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
    assert note == "Tokens are estimates, marked with ~."
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
