"""`kill -9` of any process of a fleet and of the servers it stands on, while it works: SPEC C7, C12, D5."""

import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random
from threading import Thread

import openai
import pytest

from tests.support.fleet import UNAVAILABLE_ERRORS, Fleet, Watch, running_fleet
from tests.support.postgres_server import Postgres, running_postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    CHAT,
    FORM,
    await_end,
    chat_lines,
    results_of,
    running_mock,
    submit,
    upload_form,
    wait_until,
)

_INTERRUPTED = "Validation was interrupted; create the batch again"
_LEASE = 3
_KINDS = 6
"""The number of kinds of kills; each of them happens at least once."""
_TRIES = 200


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """Run a server for one test, which may kill it."""
    with running_postgres() as server:
        yield server


class Ordeal:
    """Kills, each followed by another life, and the batches that were acknowledged in between."""

    def __init__(self, fleet: Fleet, postgres: Postgres, bucket: Seaweed, watch: Watch, random: Random) -> None:
        self._fleet, self._postgres, self._bucket = fleet, postgres, bucket
        self._watch, self._random = watch, random
        self._promised: dict[str, bytes] = {}
        self._names = 0
        self.kills: list[Callable[[], None]] = [
            self._kill_worker,
            self._kill_postgres,
            self._kill_during_upload,
            self._kill_worker,
            self._kill_during_create,
            self._kill_bucket,
        ]

    def start_batch(self, lines: int) -> None:
        data = self._new_lines(lines)
        self._promise(_again(lambda: submit(self._fleet.client(), data).id), data)

    @property
    def promised_lines(self) -> int:
        """The number of lines of all batches that were acknowledged."""
        return sum(data.count(b"\n") for data in self._promised.values())

    def check(self) -> None:
        """C7, C12: what was acknowledged is complete; what was not is complete too, or refused with a reason."""
        client = self._fleet.client()
        for batch_id, data in self._promised.items():
            records = results_of(client, self._watch.batch(batch_id), data)
            assert [record["error"] for record in records.values() if record["error"]] == []
        for batch in client.batches.list(limit=100):
            ended = await_end(client, batch.id)
            assert ended.status == "completed" or _is_interrupted(ended)

    def check_everything(self) -> None:
        """F6: rows, objects, counts and money agree, right after a kill and at the end."""
        self._fleet.apis[0].command("fsck", f"--storage-url={self._fleet.settings['storage_url']}")

    def _kill_worker(self) -> None:
        worker = self._random.choice(self._fleet.workers)
        worker.kill()
        worker.start()

    def _kill_postgres(self) -> None:
        self._postgres.kill()
        time.sleep(self._random.uniform(0, 1))
        self._postgres.start()

    def _kill_bucket(self) -> None:
        self._bucket.kill()
        self._bucket.start()

    def _kill_during_upload(self) -> None:
        node = self._random.choice(self._fleet.apis)
        body = upload_form(self._new_lines(20_000))
        with node.connect() as connection:
            connection.sendall(node.head("/v1/files", length=len(body), headers=FORM))
            connection.sendall(body[: self._random.randrange(len(body))])
            node.kill()
        node.restart()

    def _kill_during_create(self) -> None:
        """A client that got no reply asks another node again, and the batch must not exist twice."""
        node = self._random.choice(self._fleet.apis)
        client, data = node.client(), self._new_lines(500)
        uploaded = _again(lambda: client.files.create(file=data, purpose="batch").id)

        def create() -> None:
            try:
                created = client.batches.create(input_file_id=uploaded, endpoint=CHAT, completion_window="24h")
            except openai.APIConnectionError:
                return
            self._promise(created.id, data)

        creating = Thread(target=create)
        creating.start()
        time.sleep(self._random.uniform(0, 0.3))
        node.kill()
        creating.join()
        node.restart()

    def _promise(self, batch_id: str, data: bytes) -> None:
        self._promised[batch_id] = data
        self._watch.add(batch_id)

    def _new_lines(self, count: int) -> bytes:
        """No two batches have a line in common, so that what runs twice is seen."""
        self._names += 1
        return chat_lines(f"batch {self._names} line {n}" for n in range(count))


@pytest.mark.parametrize(
    ("size", "most", "between"),
    [(1_500, _KINDS, 0.5), pytest.param(20_000, 1_000, 3.0, marks=pytest.mark.proof)],
)
def test_nothing_is_lost_and_nothing_is_there_twice(
    tmp_path: Path, own_postgres: Postgres, own_bucket: Seaweed, size: int, most: int, between: float
) -> None:
    """D5, C7, C12: workers, API nodes in the middle of an upload and of a create, PostgreSQL and the bucket are killed
    one after the other; every line is in the files once, and no count ever falls."""
    with (
        running_mock(delay=0.3) as mock,
        running_fleet(
            tmp_path,
            *("api", "api", "worker", "worker", "worker"),
            postgres=own_postgres,
            seaweed=own_bucket,
            upstream_url=mock.url,
            max_concurrency=96,
            lease_seconds=_LEASE,
        ) as fleet,
        Watch(fleet) as watch,
    ):
        ordeal = Ordeal(fleet, own_postgres, own_bucket, watch, Random(size))
        ordeal.start_batch(size)
        kills, left, last_kill = 0, 0, 0.0
        for kill in islice(cycle(ordeal.kills), most):
            # Only a fleet that works is worth killing.
            watch.await_progress()
            time.sleep(between)
            if watch.done > ordeal.promised_lines * 0.9:
                if kills >= _KINDS:
                    break
                # The kills take longer on a busy machine, and the fleet must have work during each of them.
                ordeal.start_batch(size)
            left = ordeal.promised_lines - watch.done
            kill()
            kills, last_kill = kills + 1, time.monotonic()
            ordeal.check_everything()
        assert kills >= _KINDS
        assert left > 0
        wait_until(watch.all_ended, what="the end of every batch")
        took = time.monotonic() - last_kill
        ordeal.check()
        ordeal.check_everything()
        stats = mock.stats()
        print(
            f"{ordeal.promised_lines} lines, {kills} kills: {stats['requests'] - stats['distinct']} lines asked again, "
            f"{left} left at the last kill, all ended {took:.1f} s after it"
        )


def _again(attempt: Callable[[], str]) -> str:
    for _ in range(_TRIES):
        try:
            return attempt()
        except UNAVAILABLE_ERRORS:
            time.sleep(0.05)
    return attempt()


def _is_interrupted(batch: openai.types.Batch) -> bool:
    errors = (batch.errors and batch.errors.data) or []
    return batch.status == "failed" and [error.message for error in errors] == [_INTERRUPTED]
