"""One poisonous line takes nobody down with it: not when it kills the upstream, not when it kills the worker (D5)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from tests.support.service import (
    Mock,
    Program,
    Service,
    await_end,
    chat_lines,
    results_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)

_SERVE_AND_DIE = """
import os

from batchline.cli import main
from batchline.upstream.http import HttpUpstream

post = HttpUpstream.post


async def post_or_die(self, path, body):
    if b"KILL-WORKER" in body:
        os._exit(77)
    return await post(self, path, body)


HttpUpstream.post = post_or_die
main(prog_name="batchline")
"""


_WORKER_DIED = 77


def test_a_line_that_kills_the_upstream_fails_alone(tmp_path: Path) -> None:
    """D5, D2: 999 of 1,000 succeed though the upstream went down under them, and the guilty one is told apart."""
    lines = chat_lines("[[crash]]" if n == 500 else f"good {n}" for n in range(1000))
    with (
        _supervised_mock(restart_after=2.0) as mock,
        running_service(tmp_path, mock.url, max_concurrency=16) as service,
    ):
        client = service.client()
        batch = await_end(client, submit(client, lines).id)
        records = results_of(client, batch, lines)
    failed = {name: record["error"] for name, record in records.items() if record["error"]}
    assert list(failed) == ["line-500"]
    assert failed["line-500"]["code"] == "internal_error"
    assert failed["line-500"]["message"].startswith("[legacy:retries_exhausted] Line failed after 4 attempts: ")


def test_a_line_that_kills_the_worker_is_given_up_after_its_strikes(tmp_path: Path) -> None:
    """D5, D2: every life of the process ends on it, until it is not delivered any more; all others succeed."""
    script = tmp_path / "serve.py"
    script.write_text(_SERVE_AND_DIE)
    lines = chat_lines("KILL-WORKER" if n == 17 else f"good {n}" for n in range(40))
    with (
        running_mock(delay=0.2) as mock,
        running_service(tmp_path, mock.url, command=(str(script), "serve"), max_concurrency=4) as service,
    ):
        batch_id = submit(service.client(), lines).id
        deaths = _restart_until_it_lives(service)
        client = service.client()
        records = results_of(client, await_end(client, batch_id), lines)
    failed = {name: record["error"] for name, record in records.items() if record["error"]}
    assert list(failed) == ["line-17"]
    assert failed["line-17"]["code"] == "internal_error"
    assert failed["line-17"]["message"].startswith("[legacy:dlq_exhausted] ")
    assert 3 <= deaths <= 6


def _restart_until_it_lives(service: Service) -> int:
    """How often the process died before the batch was over."""
    deaths = 0
    while not _finishes(service.program):
        assert service.program.exit_code == _WORKER_DIED
        deaths += 1
        service.start()
    service.await_ready()
    return deaths


def _finishes(life: Program) -> bool:
    wait_until(lambda: life.exit_code is not None or "batch finished" in life.log, what="an end, one or the other")
    return life.exit_code is None


@contextmanager
def _supervised_mock(*, restart_after: float) -> Iterator[Mock]:
    """An upstream that comes back on its port some seconds after it went down."""
    lives = [Program("-m", "batchline", "mock", "--port=0")]
    mock = Mock(lives[0])
    over = Event()

    def supervise() -> None:
        while not over.wait(0.02):
            if lives[-1].exit_code is not None and not over.wait(restart_after):
                lives.append(Program("-m", "batchline", "mock", f"--port={mock.port}"))

    supervisor = Thread(target=supervise)
    supervisor.start()
    try:
        yield mock
    finally:
        over.set()
        supervisor.join()
        for life in lives:
            life.end()
