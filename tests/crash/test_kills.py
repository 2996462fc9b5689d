"""`kill -9` at every stage of a batch, again and again on the same folder."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Thread
from time import sleep
from typing import Any

import openai
import pytest

from tests.support.service import (
    CHAT,
    FORM,
    Mock,
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
    running_service,
    submit,
    upload_form,
    wait_until,
)

_CONCURRENCY = 4
_DELAY = 0.1
_LINES = 120
_LATE = 100
"""Far more lines than a kill may cost have been answered when this many are on their way."""

_AT_RISK = _CONCURRENCY + 1.6 * _CONCURRENCY / _DELAY
"""What one kill may cost: the lines in flight, and the answers since the last record. Answers are recorded once per
second, or a little later on a busy machine. It is far less than ``_LATE``, the cost if nothing is recorded."""

_KILLS_A_ROUND = 2
"""A line is given up only after more deaths than this, so within a round every line must still succeed."""


class Ordeal:
    """Kills at observable moments, and what was promised before them."""

    def __init__(self, service: Service, mock: Mock, random: Random) -> None:
        self._service, self._mock, self._random = service, mock, random
        self._names = 0
        self._running: dict[str, bytes] = {}
        self.moments: list[Callable[[], None]] = [
            self.kill_during_upload,
            self.kill_during_create,
            self.kill_during_dispatch,
            self.kill_around_record,
            self.kill_during_finalizing,
        ]

    def start_batch(self, lines: int = _LINES, directive: str = "") -> str:
        """A batch that was answered with 200, so that from now on it must end well."""
        data = self._new_lines(lines, directive)
        batch_id = submit(self._service.client(), data).id
        self._running[batch_id] = data
        return batch_id

    def kill_during_upload(self) -> None:
        body = upload_form(self._new_lines(20_000, ""))
        with self._service.connect() as connection:
            connection.sendall(self._service.head("/v1/files", length=len(body), headers=FORM))
            connection.sendall(body[: self._random.randrange(len(body))])
            self._kill_soon(0.01)

    def kill_during_create(self) -> None:
        data = self._new_lines(_LINES, "")
        client = self._service.client()
        uploaded = client.files.create(file=data, purpose="batch")

        def create() -> None:
            try:
                created = client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
            except openai.APIConnectionError:
                return
            self._running[created.id] = data

        creating = Thread(target=create)
        creating.start()
        self._kill_soon(0.3)
        creating.join()

    def kill_during_dispatch(self) -> None:
        before = self._mock.stats()["requests"]
        self.start_batch()
        wanted = before + self._random.randrange(_LATE, _LINES)
        wait_until(lambda: self._mock.stats()["requests"] >= wanted, what="lines on their way")
        self._kill_soon(0.05)

    def kill_around_record(self) -> None:
        batch_id = self.start_batch()
        client = self._service.client()
        wait_until(lambda: counts_of(client.batches.retrieve(batch_id))[1] > 0, what="the first record")
        self._kill_soon(1.2)

    def kill_during_finalizing(self) -> None:
        batch_id = self.start_batch(64, "[[huge=300000]]")
        client = self._service.client()
        over = {"finalizing", "completed"}
        wait_until(lambda: client.batches.retrieve(batch_id).status in over, what="finalizing")
        self._kill_soon(0.05)

    def check_batches(self) -> None:
        """C7, C12: what was acknowledged is complete; what was not is complete too, or refused in words."""
        client = self._service.client()
        for batch_id, data in self._running.items():
            batch = await_end(client, batch_id)
            assert batch.status == "completed"
            assert all(record["error"] is None for record in results_of(client, batch, data).values())
        self._running.clear()
        for batch in client.batches.list(limit=100):
            ended = await_end(client, batch.id)
            assert ended.status == "completed" or _interrupted(ended)

    def check_folder(self) -> None:
        """B2: what no row stands for is gone; what the API lists is there."""
        client = self._service.client()
        wait_until(lambda: _stored(self._service.data_dir) == _listed(client), what="only what is listed is stored")

    def check_everything(self) -> None:
        """F6: rows, objects, counts and money agree, right after a start and in the middle of the work."""
        self._service.command("fsck", "--work-retention-seconds=0")

    def repeats(self) -> int:
        stats = self._mock.stats()
        again: int = stats["requests"] - stats["distinct"]
        return again

    def _kill_soon(self, at_most: float) -> None:
        sleep(self._random.uniform(0, at_most))
        self._service.kill()

    def _new_lines(self, count: int, directive: str) -> bytes:
        """No two lines of all batches are alike, so that the upstream can tell which one came twice."""
        self._names += 1
        return chat_lines(f"{directive} {self._names} {n}" for n in range(count))


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.proof)])
@pytest.mark.rule("F6", "A service that was killed again and again has nothing wrong, at any time.")
def test_nothing_acknowledged_is_lost_and_nothing_recorded_runs_again(tmp_path: Path, kills: int) -> None:
    """B2, C6, C7, C12, D5: and a kill costs no more than what was in flight and one second of answers."""
    random = Random(kills)
    with (
        running_mock(delay=_DELAY) as mock,
        running_service(tmp_path, mock.url, max_concurrency=_CONCURRENCY, work_retention_seconds=0) as service,
    ):
        ordeal = Ordeal(service, mock, random)
        for first in range(0, kills, _KILLS_A_ROUND):
            repeats_before = ordeal.repeats()
            ordeal.start_batch(_LINES // 4)
            for number in range(first, first + _KILLS_A_ROUND):
                ordeal.moments[number % len(ordeal.moments)]()
                service.restart()
                ordeal.check_everything()
            ordeal.check_batches()
            assert ordeal.repeats() - repeats_before <= _KILLS_A_ROUND * _AT_RISK
        ordeal.check_folder()
        ordeal.check_everything()


def _interrupted(batch: Any) -> bool:
    """C6: validation died, and the client that never heard of it can read why."""
    messages = [fault.message for fault in batch.errors.data]
    return batch.status == "failed" and messages == ["Validation was interrupted; create the batch again"]


def _stored(data_dir: Path) -> tuple[set[str], int, int]:
    """Uploads by name, how many results, and how many files of work that is over or was never finished."""
    root = data_dir / "objects"
    objects = [path.relative_to(root).parts for path in root.rglob("*") if path.is_file()]
    uploads = {parts[-1] for parts in objects if parts[0] == "uploads"}
    results = sum(parts[0] == "results" for parts in objects)
    work = sum(parts[0] not in {"uploads", "results", "identity"} for parts in objects)
    return uploads, results, work


def _listed(client: openai.OpenAI) -> tuple[set[str], int, int]:
    files = list(client.files.list())
    uploads = {file.id for file in files if file.purpose == "batch"}
    return uploads, len(files) - len(uploads), 0
