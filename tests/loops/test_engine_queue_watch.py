"""The engine's queue is read while lines are in flight, rarely if there is none, and no error ends it (D9)."""

import logging
from collections.abc import Iterator
from contextlib import closing

import pytest

from batchline.domain.engine_queue import QueueLength
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.loops.engine_queue_watch import EngineQueueWatch
from tests.support.virtual_loop import VirtualLoop

LENGTH = QueueLength(running=8, waiting=3)
REFUSED = Fault(kind=FaultKind.REFUSED, detail="cannot connect to the upstream: connection refused")
OVERLOADED = Answer(status=503, body=b"")
Reading = QueueLength | Reply | Exception | None


@pytest.fixture
def virtual() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as virtual:
        yield virtual


class Queue:
    """Notes when it is read; ``readings`` are returned or raised in turn, and the last one again and again."""

    def __init__(self, virtual: VirtualLoop, *readings: Reading) -> None:
        self._virtual, self._readings = virtual, list(readings)
        self.times: list[float] = []

    async def read(self) -> QueueLength | Reply | None:
        self.times.append(self._virtual.now)
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if isinstance(reading, Exception):
            raise reading
        return reading


class Watched:
    """A watch that runs, and what it reported."""

    def __init__(self, virtual: VirtualLoop, *readings: Reading, busy: bool = True) -> None:
        self.queue, self.busy = Queue(virtual, *readings), busy
        self.lengths: list[tuple[str, QueueLength]] = []
        watch = EngineQueueWatch(
            "gpu",
            queue=self.queue,
            clock=virtual.clock,
            is_busy=lambda: self.busy,
            on_queue_length=lambda upstream, length: self.lengths.append((upstream, length)),
        )
        self.running = virtual.loop.create_task(watch.run())


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.rule("D9", "While lines are in flight, the engine's queue is read every 5 seconds.")
def test_a_busy_engine_is_read_every_five_seconds(virtual: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(virtual, LENGTH)
    virtual.advance(22)
    assert watched.queue.times == [0, 5, 10, 15, 20]
    assert watched.lengths == [("gpu", LENGTH)] * 5
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert vars(caplog.records[0])["upstream"] == "gpu"


@pytest.mark.rule("D9", "An idle engine is asked once, at the start.")
def test_an_idle_engine_is_read_only_at_the_start(virtual: VirtualLoop) -> None:
    watched = Watched(virtual, LENGTH, busy=False)
    virtual.advance(1000)
    assert watched.queue.times == [0]
    watched.busy = True
    virtual.advance(12)
    first, *_ = later = watched.queue.times[1:]
    assert 1000 <= first <= 1001
    assert later == [first, first + 5, first + 10]
    watched.busy = False
    virtual.advance(1000)
    assert len(watched.queue.times) == 4


@pytest.mark.rule("D9", "An engine that reports no queue is asked again every 10 minutes.")
def test_an_engine_without_a_queue_is_asked_rarely(virtual: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked a second time soon: some engines report their queue only after their first request."""
    watched = Watched(virtual, None)
    virtual.advance(2000)
    assert watched.queue.times == [0, 5, 605, 1205, 1805]
    assert watched.lengths == []
    assert caplog.records == []


def test_an_engine_that_reports_a_queue_later_is_found(virtual: VirtualLoop) -> None:
    watched = Watched(virtual, None, None, LENGTH)
    virtual.advance(611)
    assert watched.queue.times == [0, 5, 605, 610]
    assert len(watched.lengths) == 2


def test_a_failing_engine_is_asked_less_and_less_often(virtual: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(virtual, REFUSED, OVERLOADED, REFUSED)
    virtual.advance(3000)
    waits = [after - before for before, after in zip(watched.queue.times, watched.queue.times[1:], strict=False)]
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert caplog.records == []


def test_an_engine_that_starts_after_the_worker_is_found_soon(virtual: VirtualLoop) -> None:
    watched = Watched(virtual, REFUSED, REFUSED, REFUSED, LENGTH)
    virtual.advance(41)
    assert watched.queue.times == [0, 5, 15, 35, 40]
    assert len(watched.lengths) == 2


def test_one_failed_read_is_no_loss(virtual: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that is too busy to answer in time is not reported as lost again and again."""
    watched = Watched(virtual, *[LENGTH, REFUSED, OVERLOADED, LENGTH, None] * 20, LENGTH)
    virtual.advance(1000)
    assert len(watched.lengths) > 100
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        ([None], "the engine reports no queue at /metrics"),
        ([REFUSED], REFUSED.detail),
        ([OVERLOADED], "HTTP status 503"),
    ],
)
def test_a_loss_is_logged_once_and_so_is_the_return(
    virtual: VirtualLoop, caplog: pytest.LogCaptureFixture, readings: list[Reading], reason: str
) -> None:
    watched = Watched(virtual, LENGTH, LENGTH, *readings * 6, LENGTH)
    virtual.advance(3600)
    found, lost, again = caplog.records
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert found.getMessage() == again.getMessage() != lost.getMessage()
    assert vars(lost)["reason"] == reason
    assert len(watched.lengths) > 3


@pytest.mark.rule("D9", "No error of the reader ends the watch.")
def test_an_unexpected_error_does_not_end_the_watch(virtual: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(virtual, LENGTH, KeyError("a bug"), LENGTH)
    virtual.advance(606)
    assert watched.queue.times == [0, 5, 605]
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]
    assert not watched.running.done()


def test_it_ends_when_it_is_cancelled(virtual: VirtualLoop) -> None:
    watched = Watched(virtual, LENGTH)
    virtual.advance(7)
    virtual.call(watched.running.cancel)
    assert watched.running.cancelled()
