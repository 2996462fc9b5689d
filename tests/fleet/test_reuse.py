"""Real services that reuse answers, on one machine and on PostgreSQL and a bucket: rule G7."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types import Batch

from tests.support.fleet import progress_of, running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    CHAT,
    Mock,
    Service,
    await_end,
    chat_line,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
    running_service,
)

_CONFIG = """
metering = true
[models.m]
input_price = 1
output_price = 2
"""
_SIZES = pytest.mark.parametrize("lines", [1_000, pytest.param(50_000, marks=pytest.mark.proof)])
_WORDS = "word " * 100
"""Prompts of a usual length."""


class Place(NamedTuple):
    """A service under test, and a way to start all of its processes again."""

    api: Service
    restart: Callable[[], None]


Start = Callable[[Mock], Any]


_ON_ONE = pytest.mark.parametrize("start", ["sqlite", pytest.param("postgres", marks=pytest.mark.proof)], indirect=True)


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Return a context that runs a service on one of the two kinds of stores."""
    config = tmp_path / "batchline.toml"
    config.write_text(_CONFIG)

    @contextmanager
    def on_one_machine(mock: Mock) -> Iterator[Place]:
        with running_service(tmp_path, mock.url, config=config) as service:
            yield Place(service, service.restart)

    @contextmanager
    def on_many(mock: Mock) -> Iterator[Place]:
        postgres: Postgres = request.getfixturevalue("postgres")
        seaweed: Seaweed = request.getfixturevalue("seaweed")
        with running_fleet(
            tmp_path, "api", "worker", postgres=postgres, seaweed=seaweed, upstream_url=mock.url, config=config
        ) as fleet:

            def restart() -> None:
                for node in fleet.nodes:
                    node.restart()

            yield Place(fleet.apis[0], restart)

    return on_one_machine if request.param == "sqlite" else on_many


def _run(place: Place, data: bytes, *, reuse: bool) -> Batch:
    client = place.api.client()
    uploaded = client.files.create(file=data, purpose="batch")
    created = client.batches.create(
        input_file_id=uploaded.id,
        endpoint=CHAT,
        completion_window="24h",
        extra_body={"batchline": {"reuse": reuse}},
    )
    return await_end(client, created.id)


@_SIZES
@_ON_ONE
@pytest.mark.rule("G7", "A batch that is run again after a restart asks only for what was edited.")
def test_a_batch_with_one_percent_edited_asks_for_one_percent(start: Start, lines: int) -> None:
    with running_mock() as mock, start(mock) as place:
        place.api.command("orgs", "set-balance", place.api.account["organization_id"], "1000000")
        prompts = [f"question {n} {_WORDS}" for n in range(lines)]
        begun = time.monotonic()
        first = _run(place, chat_lines(prompts), reuse=False)
        ended = time.monotonic()
        calls = mock.stats()["requests"]
        assert calls == lines
        place.restart()
        edited = [f"edited {prompt}" if n % 100 == 0 else prompt for n, prompt in enumerate(prompts)]
        data = chat_lines(edited)
        begun_again = time.monotonic()
        second = _run(place, data, reuse=True)
        ended_again = time.monotonic()
        assert counts_of(second) == (lines, lines, 0)
        assert mock.stats()["requests"] - calls == lines // 100
        bills = [progress_of(place.api, batch.id) for batch in (first, second)]
        assert bills[1]["reused"] == lines - lines // 100
        assert bills[1]["cost"] == pytest.approx(bills[0]["cost"] / 100, rel=0.1)
        assert bills[1]["saved"] == pytest.approx(bills[0]["cost"] * 0.99, rel=0.01)
        records = results_of(place.api.client(), second, data)
        assert sum(record.get("reused", False) for record in records.values()) == bills[1]["reused"]
        print(
            f"\n{lines} lines: {calls} calls, {ended - begun:.1f} s, cost {bills[0]['cost']}; with 1 % edited: "
            f"{lines // 100} calls, {ended_again - begun_again:.1f} s, cost {bills[1]['cost']}, "
            f"saved {bills[1]['saved']}"
        )


@_SIZES
@_ON_ONE
@pytest.mark.rule("G7", "Of many equal lines one runs.")
def test_of_many_equal_lines_one_is_asked_for(start: Start, lines: int) -> None:
    equal = lines * 4 // 5
    data = b"".join(chat_line(f"line-{n}", "the same question" if n < equal else f"question {n}") for n in range(lines))
    with running_mock() as mock, start(mock) as place:
        place.api.command("orgs", "set-balance", place.api.account["organization_id"], "1000000")
        batch = _run(place, data, reuse=True)
        assert counts_of(batch) == (lines, lines, 0)
        assert mock.stats()["requests"] == lines - equal + 1
        assert progress_of(place.api, batch.id)["reused"] == equal - 1
        print(f"\n{lines} lines, {equal} of them equal: {mock.stats()['requests']} calls")


@_SIZES
@_ON_ONE
@pytest.mark.rule("G7", "If the one that runs of many equal lines fails, the others run.")
def test_if_the_one_fails_the_others_run(start: Start, lines: int) -> None:
    equal = lines * 4 // 5
    data = b"".join(
        chat_line(f"line-{n}", "[[status=400 times=1]] the same" if n < equal else f"question {n}")
        for n in range(lines)
    )
    with running_mock() as mock, start(mock) as place:
        place.api.command("orgs", "set-balance", place.api.account["organization_id"], "1000000")
        batch = _run(place, data, reuse=True)
        assert counts_of(batch) == (lines, lines - 1, 1)
        assert mock.stats()["requests"] == lines
        print(f"\n{lines} lines, {equal} of them equal, the first fails: {mock.stats()['requests']} calls")
