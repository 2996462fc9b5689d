"""A background task runs at its interval, at once when woken, and through every outage."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from batchline.loops.periodic import PeriodicTask
from tests.support.virtual_loop import VirtualLoop


@pytest.fixture
def virtual() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as virtual:
        yield virtual


class Step:
    """Notes when it runs; ``results`` are returned or raised in turn, and then False."""

    def __init__(self, virtual: VirtualLoop, *results: bool | Exception) -> None:
        self._virtual, self._results = virtual, list(results)
        self.times: list[float] = []

    async def __call__(self) -> bool:
        self.times.append(self._virtual.now)
        result = self._results.pop(0) if self._results else False
        if isinstance(result, Exception):
            raise result
        return result


def start(virtual: VirtualLoop, step: Step, *, every: float = 10) -> PeriodicTask:
    task = PeriodicTask("test", step, every=every, clock=virtual.clock)
    virtual.loop.create_task(task.run())
    return task


def test_it_runs_at_once_and_then_at_its_interval(virtual: VirtualLoop) -> None:
    step = Step(virtual)
    start(virtual, step)
    virtual.advance(25)
    assert step.times == [0, 10, 20]


def test_it_runs_again_at_once_while_there_is_more_to_do(virtual: VirtualLoop) -> None:
    step = Step(virtual, True, True)
    start(virtual, step)
    virtual.advance(5)
    assert step.times == [0, 0, 0]


def test_a_woken_task_runs_now_and_the_interval_begins_anew(virtual: VirtualLoop) -> None:
    step = Step(virtual)
    task = start(virtual, step)
    virtual.advance(4)
    virtual.call(task.wake)
    virtual.advance(11)
    assert step.times == [0, 4, 14]


@pytest.mark.parametrize("error", [StoreDown("away"), ObjectsDown("full"), LeaseLost("taken"), KeyError("a bug")])
def test_an_error_does_not_end_the_task(
    virtual: VirtualLoop, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """D5: it is logged with the name of the task, and the step runs again."""
    step = Step(virtual, error)
    start(virtual, step)
    virtual.advance(15)
    assert step.times == [0, 11]
    assert vars(caplog.records[0])["task"] == "test"
    assert (caplog.records[0].levelname == "ERROR") is isinstance(error, KeyError)


def test_a_task_that_fails_is_not_retried_more_than_once_a_second(virtual: VirtualLoop) -> None:
    """Even if it is woken all the time."""
    step = Step(virtual, *[StoreDown("away")] * 100)
    task = start(virtual, step)
    for _ in range(50):
        virtual.advance(0.1)
        virtual.call(task.wake)
    assert len(step.times) <= 6
