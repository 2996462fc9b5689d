"""What all processes do for a batch, and why its other lines wait (D3, D11)."""

from typing import Any

import pytest

from batchline.domain.activity import activity_of
from batchline.domain.fleet import ModelQueue, Report, UpstreamLoad
from batchline.domain.models import DEFAULT_UPSTREAM, Catalog, Model
from batchline.domain.progress import Pause
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus, Stop
from batchline.domain.waiting import (
    QuarantineWait,
    QueueWait,
    RateLimitWait,
    RetryAfterWait,
    RetryWait,
    SlotsWait,
    StorageWait,
    UpstreamPause,
    Wait,
)
from tests.support.records import make_batch

CATALOG = Catalog(
    [
        Model(id="m", name="m"),
        Model(id="n", name="n"),
        Model(id="pair", name="pair", upstreams=("east", "west")),
    ]
)
GONE = Pause(upstream="east", detail="refused", since=5)
PAUSED = UpstreamPause(upstream="east", detail="refused", since=5, model=None)
SLOTS = ModelQueue(reason="slots", lines=4)
RATE = ModelQueue(reason="rate_limit", lines=4, rate=2.5)
BLOCKED = ModelQueue(reason="retry_after", lines=0, until=70)


def _batch(**fields: Any) -> Batch:
    return make_batch(**{"project_id": "mine", "total": 100} | fields)


def _report(load: UpstreamLoad | None = None, *, owner: str = "a", **fields: Any) -> Report:
    """Return the report of a worker with this load of the default upstream."""
    given: dict[str, Any] = {"upstream_loads": {} if load is None else {DEFAULT_UPSTREAM: load}}
    return Report(owner=owner, runs_batches=True, **given | fields)


def _load(hold: str | None = None, *, limit: int = 8, sync_calls: int = 0, **queues: ModelQueue) -> UpstreamLoad:
    """Return a load with eight lines in flight, two of them of the project that asks."""
    return UpstreamLoad(
        in_flight=8,
        limit=limit,
        sync_calls=sync_calls,
        hold=hold,
        queues=queues,
        projects={"mine": 2, "theirs": 6},
    )


def _wait(*reports: Report, models: tuple[str, ...] = ("m",), **batch: Any) -> Wait | None:
    return activity_of(_batch(**batch), models, catalog=CATALOG, reports=reports).waiting_for


def test_what_all_do_for_a_batch_is_summed() -> None:
    reports = [
        _report(UpstreamLoad(limit=8), batches={"batch_1": 3}),
        _report(
            upstream_loads={DEFAULT_UPSTREAM: UpstreamLoad(limit=4), "east": UpstreamLoad(limit=100)},
            batches={"batch_1": 2, "batch_2": 7},
        ),
        Report(owner="api", runs_batches=False, upstream_loads={DEFAULT_UPSTREAM: UpstreamLoad(sync_calls=1)}),
    ]
    seen = activity_of(_batch(), ["m"], catalog=CATALOG, reports=reports)
    assert (seen.in_flight, seen.concurrency) == (5, 12)


@pytest.mark.rule("D3", "A batch waits for a pause only if no worker finds any upstream of the model available.")
def test_a_batch_waits_when_nobody_finds_any_upstream_of_a_model_there() -> None:
    away, there = UpstreamLoad(pauses=[GONE]), UpstreamLoad()
    gone = _report(upstream_loads={"east": away, "west": away})
    assert _wait(gone, gone, models=("pair",)) == PAUSED
    one = _report(upstream_loads={"east": away, "west": there})
    assert _wait(gone, one, models=("pair",)) == QueueWait(workers=2)


@pytest.mark.rule("D11", "A pause of one model names the model, and holds back no other.")
def test_the_pause_of_a_model_is_no_pause_of_others() -> None:
    pause = Pause(upstream=DEFAULT_UPSTREAM, model="m", detail="http_401", since=9)
    report = _report(UpstreamLoad(pauses=[pause]))
    expected = UpstreamPause(upstream=DEFAULT_UPSTREAM, detail="http_401", since=9, model="m")
    assert _wait(report) == expected
    assert _wait(report, models=("n", "m")) == expected
    assert _wait(report, models=("n",)) == QueueWait(workers=1)


@pytest.mark.rule("D11", "Of several reasons the most important one is given.")
def test_the_most_important_reason_is_given() -> None:
    """Each step takes the most important reason away."""
    paused = UpstreamLoad(
        pauses=[Pause(upstream=DEFAULT_UPSTREAM, detail="timeout", since=3)], hold="storage", queues={"m": BLOCKED}
    )
    reports = [
        (paused, UpstreamPause(upstream=DEFAULT_UPSTREAM, detail="timeout", since=3, model=None)),
        (_load("storage", m=BLOCKED), StorageWait()),
        (_load("quarantine", m=BLOCKED), QuarantineWait(upstream=DEFAULT_UPSTREAM)),
        (_load(m=SLOTS, n=BLOCKED), RetryAfterWait(upstream=DEFAULT_UPSTREAM, model="n", until=70)),
        (_load(m=SLOTS, n=RATE), RateLimitWait(upstream=DEFAULT_UPSTREAM, model="n", rate=2.5)),
    ]
    for load, expected in reports:
        assert _wait(_report(load, retrying={"batch_1": 3}), models=("m", "n")) == expected
    slots = _wait(_report(_load(m=SLOTS), retrying={"batch_1": 3}))
    assert isinstance(slots, SlotsWait)
    assert _wait(_report(_load(), retrying={"batch_1": 3})) == RetryWait(lines=3)
    assert _wait(_report(_load())) == QueueWait(workers=1)


@pytest.mark.rule("D11", "A batch with waiting lines always has a reason, also without any worker.")
def test_without_a_worker_that_is_the_reason() -> None:
    api = Report(owner="api", runs_batches=False, upstream_loads={DEFAULT_UPSTREAM: UpstreamLoad(sync_calls=1)})
    assert _wait() == _wait(api) == QueueWait(workers=0)
    assert _wait(api, _report(), status=BatchStatus.VALIDATING, total=0) == QueueWait(workers=1)


@pytest.mark.rule("D11", "Lines that are in flight, recorded or about to be recorded do not wait.")
def test_lines_that_run_or_have_run_do_not_wait() -> None:
    workers = [
        _report(_load(m=SLOTS), owner="a", batches={"batch_1": 2}, unrecorded={"batch_1": 3, "batch_2": 50}),
        _report(_load(m=SLOTS), owner="b", batches={"batch_1": 4, "batch_2": 50}, unrecorded={"batch_1": 1}),
    ]
    assert _wait(*workers, completed=80, failed=10) is None
    assert _wait(*workers, completed=80, failed=9) is not None


@pytest.mark.rule("D11", "The rest of a stopped batch never runs, so it waits for nothing.")
@pytest.mark.parametrize(
    "fields",
    [
        {"stop": Stop.CANCELLED},
        {"stop": Stop.EXPIRED},
        {"status": BatchStatus.CANCELLING},
        {"status": BatchStatus.FINALIZING},
        {"status": BatchStatus.COMPLETED},
    ],
)
def test_a_batch_that_starts_no_line_waits_for_nothing(fields: dict[str, Any]) -> None:
    assert _wait(_report(_load(m=SLOTS)), **fields) is None


@pytest.mark.rule("D11", "If all waiting lines wait for their next attempt, neither a rate nor the slots are given.")
def test_lines_that_are_not_ready_wait_for_no_slot() -> None:
    retrying = {"batch_1": 20}
    for queue in (SLOTS, RATE):
        assert _wait(_report(_load(m=queue), retrying=retrying), completed=80) == RetryWait(lines=20)
        assert _wait(_report(_load(m=queue), retrying=retrying), completed=79) != RetryWait(lines=20)
    blocked = RetryAfterWait(upstream=DEFAULT_UPSTREAM, model="m", until=70)
    assert _wait(_report(_load(m=BLOCKED), retrying=retrying), completed=80) == blocked


@pytest.mark.rule("D11", "The rate is that of all workers.")
def test_rates_are_summed_and_the_first_end_of_a_block_counts() -> None:
    unknown = ModelQueue(reason="rate_limit", lines=1)
    limited = [_report(_load(m=RATE), owner="a"), _report(_load(m=RATE), owner="b"), _report(_load(m=unknown))]
    assert _wait(*limited) == RateLimitWait(upstream=DEFAULT_UPSTREAM, model="m", rate=5.0)
    assert _wait(_report(_load(m=unknown))) == RateLimitWait(upstream=DEFAULT_UPSTREAM, model="m", rate=None)
    later = ModelQueue(reason="retry_after", lines=9, until=90)
    blocked = _wait(_report(_load(m=later)), _report(_load(m=BLOCKED)))
    assert blocked == RetryAfterWait(upstream=DEFAULT_UPSTREAM, model="m", until=70)


@pytest.mark.rule("D11", "Slots are given with who has taken them.")
def test_slots_are_those_of_the_workers_whose_lines_wait() -> None:
    workers = [_report(_load(m=SLOTS)), _report(_load(m=SLOTS, sync_calls=1)), _report(_load(limit=100))]
    assert _wait(*workers) == SlotsWait(
        upstream=DEFAULT_UPSTREAM, in_flight=16, limit=16, by_other_projects=12, sync_calls=1
    )


@pytest.mark.rule("D11", "Of several upstreams the one with the most waiting lines is given.")
def test_the_upstream_with_the_most_waiting_lines_is_given() -> None:
    few, many = ModelQueue(reason="rate_limit", lines=1, rate=9), ModelQueue(reason="rate_limit", lines=7, rate=3)
    report = _report(upstream_loads={"east": _load(pair=few), "west": _load(pair=many)})
    assert _wait(report, models=("pair",)) == RateLimitWait(upstream="west", model="pair", rate=3)


def test_a_reason_that_is_not_known_here_is_left_out() -> None:
    """During an upgrade, workers of the next version may know more reasons."""
    assert _wait(_report(_load("newer", m=ModelQueue(reason="newer", lines=3)))) == QueueWait(workers=1)
