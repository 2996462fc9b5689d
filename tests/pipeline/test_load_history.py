"""Samples of the load over time."""

import pytest

from batchline.domain.fleet import Report, UpstreamLoad
from batchline.pipeline.load_history import HISTORY_SECONDS, BatchSample, LoadHistory
from tests.support.clocks import SettableClock

pytestmark = pytest.mark.anyio


class _Workers:
    """Two workers, the second of which came later, and an API node."""

    def __init__(self) -> None:
        self.found: list[Report] = []

    async def reports(self) -> list[Report]:
        return self.found

    def report(self, **attempts: int) -> None:
        self.found = [Report(owner="api", runs_batches=False, upstream_loads={"gpu": UpstreamLoad(sync_calls=9)})]
        for owner, count in attempts.items():
            load = UpstreamLoad(in_flight=3, limit=8, attempts=count, attempt_seconds=count / 2)
            self.found.append(Report(owner=owner, runs_batches=True, upstream_loads={"gpu": load}, batches={"b": 3}))


async def test_the_load_of_all_workers_is_added_up_and_attempts_count_from_one_sample_to_the_next() -> None:
    workers, clock = _Workers(), SettableClock(now=1000)
    history = LoadHistory(workers=workers, clock=clock)
    for attempts in ({"one": 100}, {"one": 110}, {"one": 130, "two": 5000}, {"two": 5010}):
        workers.report(**attempts)
        await history.step()
        clock.advance(5)
    samples = history.upstream("gpu")
    assert [(each.at, each.in_flight, each.limit) for each in samples] == [
        (1000, 3, 8),
        (1005, 3, 8),
        (1010, 6, 16),
        (1015, 3, 8),
    ]
    assert [(each.attempts, each.seconds) for each in samples] == [(0, 0), (10, 5), (20, 10), (10, 5)]
    assert history.upstream("other") == []


async def test_a_batch_has_its_lines_in_flight_and_the_limit_of_its_upstreams() -> None:
    workers, clock = _Workers(), SettableClock(now=1000)
    history = LoadHistory(workers=workers, clock=clock)
    workers.report(one=1, two=1)
    await history.step()
    assert history.batch("b", {"gpu"}) == [BatchSample(at=1000, in_flight=6, limit=16)]
    assert history.batch("other", {"cpu"}) == [BatchSample(at=1000, in_flight=0, limit=0)]


async def test_only_an_hour_is_remembered() -> None:
    workers, clock = _Workers(), SettableClock(now=1000)
    history = LoadHistory(workers=workers, clock=clock)
    workers.report(one=1)
    for _ in range(2 * HISTORY_SECONDS // 5):
        await history.step()
        clock.advance(5)
    assert len(history.upstream("gpu")) == HISTORY_SECONDS // 5
    assert len(history.batch("b", {"gpu"})) == 60
