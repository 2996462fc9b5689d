"""A network between a fleet and its servers that is cut, stalls or is slow, while batches run: SPEC A6, D5, F5."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, Watch, running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    FORM,
    Reply,
    Service,
    chat_lines,
    results_of,
    running_mock,
    submit,
    upload_form,
    wait_until,
)
from tests.support.tcp_proxy import Fate, Wire, wire_to


@contextmanager
def _wired_fleet(
    folder: Path, postgres: Postgres, seaweed: Seaweed, upstream_url: str
) -> Iterator[tuple[Fleet, dict[str, Wire]]]:
    """Everything a node of this fleet asks of the servers goes over one of two wires."""
    database = postgres.new_database().rpartition("/")[2]
    with (
        wire_to(postgres.port) as to_database,
        wire_to(seaweed.port) as to_storage,
        running_fleet(
            folder,
            *("api", "worker"),
            postgres=postgres,
            seaweed=seaweed,
            environment={"AWS_ENDPOINT_URL": f"http://127.0.0.1:{to_storage.port}"},
            database_url=postgres.url(database, port=to_database.port),
            upstream_url=upstream_url,
            max_concurrency=32,
            lease_seconds=3,
        ) as fleet,
    ):
        yield fleet, {"database": to_database, "storage": to_storage}


@pytest.mark.parametrize(
    ("size", "fates"),
    [(800, [Fate.CUT]), pytest.param(6_000, [Fate.STALLED, Fate.SLOW], marks=pytest.mark.proof)],
)
def test_a_batch_survives_the_network(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed, size: int, fates: list[Fate]
) -> None:
    """A6, D5, F5: what needs a server that cannot be reached is refused in the envelope and /readyz names it, while
    /healthz stays green; afterwards all recovers by itself. Every line is in the files once, and none is blamed."""
    with (
        running_mock(delay=0.2) as mock,
        _wired_fleet(tmp_path, postgres, seaweed, mock.url) as (fleet, wires),
        Watch(fleet) as watch,
    ):
        lines = chat_lines(f"line {n}" for n in range(size))
        batch = submit(fleet.client(), lines)
        watch.add(batch.id)
        for fate in fates:
            for name, wire in wires.items():
                watch.await_progress()
                wire.become(fate)
                if fate is Fate.SLOW:
                    watch.await_progress()
                else:
                    _check_outage(fleet, name)
                assert not watch.all_over()
                wire.become(Fate.CARRIED)
                for node in fleet.nodes:
                    wait_until(node.is_ready, what=f"/readyz after {name} was {fate}")
        wait_until(watch.all_over, what="the end")
        ended = watch.batch(batch.id)
        assert ended.status == "completed"
        assert not any(record["error"] for record in results_of(fleet.client(), ended, lines).values())
        stats = mock.stats()
        print(f"{size} lines, {fates}: {stats['requests'] - stats['distinct']} asked again")


def _check_outage(fleet: Fleet, name: str) -> None:
    (api,) = fleet.apis
    for node in fleet.nodes:
        wait_until(partial(_told_not_ready, node, name), what=f"/readyz naming the {name}")
        assert node.call("GET", "/healthz").status == 200
    if name == "database":
        refused = api.call("GET", "/v1/batches")
        assert (refused.status, refused.error["type"]) == (503, "internal_error")
        assert refused.headers["retry-after"]
    refused = _upload(api)
    assert (refused.status, refused.error["type"]) == (503 if name == "database" else 500, "internal_error")


def _told_not_ready(node: Service, name: str) -> bool:
    reply = node.call("GET", "/readyz")
    return reply.status == 503 and f"{name} " in reply.error["message"]


def _upload(api: Service) -> Reply:
    return api.call("POST", "/v1/files", body=upload_form(chat_lines(["refused"])), headers=FORM)
