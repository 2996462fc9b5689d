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
from tests.support.tcp_proxy import Mode, TcpProxy, proxy_to


@contextmanager
def _fleet_behind_proxies(
    folder: Path, postgres: Postgres, seaweed: Seaweed, upstream_url: str
) -> Iterator[tuple[Fleet, dict[str, TcpProxy]]]:
    """Run a fleet whose nodes reach PostgreSQL and the bucket only through a proxy each."""
    database = postgres.new_database().rpartition("/")[2]
    with (
        proxy_to(postgres.port) as to_database,
        proxy_to(seaweed.port) as to_storage,
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
    ("size", "modes"),
    [(1_200, [Mode.CUT]), pytest.param(6_000, [Mode.STALLED, Mode.SLOW], marks=pytest.mark.proof)],
)
def test_a_batch_survives_the_network(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed, size: int, modes: list[Mode]
) -> None:
    """A6, D5, F5: what needs a server that cannot be reached is refused in the envelope and /readyz names it, while
    /healthz stays green; afterwards all recovers by itself. Every line is in the files once, and none is blamed."""
    with (
        running_mock(delay=0.2) as mock,
        _fleet_behind_proxies(tmp_path, postgres, seaweed, mock.url) as (fleet, proxies),
        Watch(fleet) as watch,
    ):
        lines = chat_lines(f"line {n}" for n in range(size))
        batch = submit(fleet.client(), lines)
        watch.add(batch.id)
        for mode in modes:
            for name, proxy in proxies.items():
                watch.await_progress()
                proxy.set_mode(mode)
                if mode is Mode.SLOW:
                    watch.await_progress()
                else:
                    _check_outage(fleet, name)
                assert not watch.all_ended()
                proxy.set_mode(Mode.FORWARD)
                for node in fleet.nodes:
                    wait_until(node.is_ready, what=f"/readyz after {name} was {mode}")
        wait_until(watch.all_ended, what="the end")
        ended = watch.batch(batch.id)
        assert ended.status == "completed"
        assert not any(record["error"] for record in results_of(fleet.client(), ended, lines).values())
        stats = mock.stats()
        print(f"{size} lines, {modes}: {stats['requests'] - stats['distinct']} asked again")


def _check_outage(fleet: Fleet, name: str) -> None:
    (api,) = fleet.apis
    for node in fleet.nodes:
        wait_until(partial(_is_not_ready, node, name), what=f"/readyz naming the {name}")
        assert node.call("GET", "/healthz").status == 200
    if name == "database":
        refused = api.call("GET", "/v1/batches")
        assert (refused.status, refused.error["type"]) == (503, "internal_error")
        assert refused.headers["retry-after"]
    refused = _upload(api)
    assert (refused.status, refused.error["type"]) == (503 if name == "database" else 500, "internal_error")


def _is_not_ready(node: Service, name: str) -> bool:
    reply = node.call("GET", "/readyz")
    if reply.status == 200:
        return bool(reply.json[name] != "ok")
    return reply.status == 503 and f"{name} " in reply.error["message"]


def _upload(api: Service) -> Reply:
    return api.call("POST", "/v1/files", body=upload_form(chat_lines(["refused"])), headers=FORM)
