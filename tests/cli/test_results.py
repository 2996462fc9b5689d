"""`batchline results`: the recorded lines of a batch (G2, G4)."""

import json

from click.testing import CliRunner, Result

from batchline.cli import main
from tests.support.run_process import Tenant
from tests.support.scripted_server import Asked, answering, reply
from tests.support.service import await_end, chat_lines, submit


def _batch(status: str = "completed", done: int = 2) -> bytes:
    return json.dumps(
        {"id": "batch_1", "status": status, "request_counts": {"total": 2, "completed": done, "failed": 0}}
    ).encode()


def _page(*lines: object, last: str | None = None, more: bool = False) -> bytes:
    return json.dumps({"object": "list", "data": lines, "last_id": last, "has_more": more}).encode()


def _results(*answers: bytes, arguments: tuple[str, ...] = ()) -> tuple[Result, list[Asked]]:
    with answering(*answers) as server:
        environment = {"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"}
        result = CliRunner(env=environment).invoke(main, ["results", "batch_1", *arguments])
    return result, server.asked


def test_recorded_lines_are_printed_one_a_line() -> None:
    lines = [{"custom_id": "a"}, {"custom_id": "b"}]
    result, asked = _results(reply(200, _page(*lines, last="c2")), reply(200, _batch()))
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in result.stdout.splitlines()] == lines
    assert result.stderr == ""
    assert asked[0].head.startswith("GET /v1/batches/batch_1/results?limit=1000 ")


def test_pages_are_read_to_the_end() -> None:
    """A page of large lines has fewer than were asked for."""
    first = [{"custom_id": str(number)} for number in range(10)]
    result, asked = _results(
        reply(200, _page(*first, last="c10", more=True)), reply(200, _page({"custom_id": "z"})), reply(200, _batch())
    )
    assert len(result.stdout.splitlines()) == 11
    assert "after=c10" in asked[1].head


def test_a_batch_that_runs_is_said_to() -> None:
    pages = [_page({"custom_id": "a"}, last="c1", more=True), _page(more=True)]
    result, _ = _results(*(reply(200, page) for page in pages), reply(200, _batch("in_progress", 1)))
    assert result.exit_code == 0
    assert "batch_1 is in_progress, 1 of 2 lines recorded; --follow waits for the others" in result.stderr


def test_failed_lines_alone() -> None:
    result, asked = _results(reply(200, _page({"custom_id": "a"})), reply(200, _batch()), arguments=("--failed",))
    assert result.exit_code == 0
    assert "status=failed" in asked[0].head


def _event(kind: str, data: str, cursor: str | None = None) -> bytes:
    return f"event: {kind}\n{f'id: {cursor}' if cursor else ':'}\ndata: {data}\n\n".encode()


def test_following_prints_every_line_once_across_a_broken_connection() -> None:
    """G2: the stream is resumed after the last line that was printed; a line that was cut off is not printed."""
    broken = (
        _event("line", '{"n":1}', "c1") + b": note\n\n" + _event("line", '{"n":2}', "c2") + b'event: line\ndata: {"n'
    )
    rest = _event("batch", "{}") + _event("line", '{"n":3}', "c3") + _event("end", "{}")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    result, asked = _results(head + broken, head + rest, arguments=("--follow",))
    assert result.exit_code == 0, result.output
    assert result.stdout == '{"n":1}\n{"n":2}\n{"n":3}\n'
    assert asked[0].header("accept") == "text/event-stream"
    assert asked[0].header("last-event-id") is None
    assert asked[1].header("last-event-id") == "c2"
    assert "trying again" in result.stderr


def test_merged_is_copied_as_it_is() -> None:
    result, asked = _results(reply(200, b'{"n":1}\n{"n":2}\n'), arguments=("--merged",))
    assert result.stdout == '{"n":1}\n{"n":2}\n'
    assert asked[0].head.startswith("GET /v1/batches/batch_1/merged ")


def test_options_that_exclude_each_other_are_2() -> None:
    for arguments in (["--merged", "--follow"], ["--failed", "--succeeded"], ["--merged", "--failed"]):
        assert CliRunner().invoke(main, ["results", "batch_1", *arguments]).exit_code == 2


def test_a_service_tells_what_is_recorded(tenant: Tenant) -> None:
    client, runner = tenant.service.client(tenant.account), CliRunner(env=tenant.environment())
    batch = await_end(client, submit(client, chat_lines(["a", "[[status=400]]", "b"])).id)

    def names(*options: str) -> list[str]:
        result = runner.invoke(main, ["results", batch.id, *options])
        assert result.exit_code == 0, result.output
        return sorted(json.loads(line)["custom_id"] for line in result.stdout.splitlines())

    assert names() == names("--follow") == names("--merged") == ["line-0", "line-1", "line-2"]
    assert names("--failed") == names("--failed", "--follow") == ["line-1"]
    assert names("--succeeded") == ["line-0", "line-2"]


def test_large_lines_are_all_printed(tenant: Tenant) -> None:
    """G2: a page of large lines is shorter than the limit, and larger than other answers."""
    client = tenant.service.client(tenant.account)
    batch = await_end(client, submit(client, chat_lines(f"[[huge=7000000]] {n}" for n in range(5))).id)
    result = CliRunner(env=tenant.environment()).invoke(main, ["results", batch.id])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout_bytes.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == [f"line-{n}" for n in range(5)]
    assert min(map(len, lines)) > 7_000_000
