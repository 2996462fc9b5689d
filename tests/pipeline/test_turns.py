"""Protects that projects take turns at places they share, and that no place is lost."""

from asyncio import Event, Task, create_task, sleep

import pytest

from batchline.pipeline.turns import Turns

pytestmark = pytest.mark.anyio


class _Line:
    """Tasks that wait for one place, and the order in which they got it."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self.order = turns, list[str]()

    async def join(self, project_id: str) -> "Task[None]":
        """Start a task that holds a place for a moment, and return it once it waits or holds one."""
        task = create_task(self._take(project_id))
        await sleep(0)
        return task

    async def _take(self, project_id: str) -> None:
        async with self._turns.turn(project_id):
            self.order.append(project_id)


async def test_a_project_waits_for_one_task_of_each_other_project() -> None:
    turns = Turns(1)
    line = _Line(turns)
    async with turns.turn("first"):
        tasks = [await line.join(project) for project in ("many", "many", "many", "few", "other", "few")]
    for task in tasks:
        await task
    assert line.order == ["many", "few", "other", "many", "few", "many"]


async def test_as_many_tasks_run_at_once_as_there_are_places() -> None:
    turns, entered = Turns(2), list[int]()
    release = Event()

    async def hold(number: int) -> None:
        async with turns.turn("project"):
            entered.append(number)
            await release.wait()

    tasks = [create_task(hold(number)) for number in range(3)]
    await sleep(0)
    assert entered == [0, 1]
    release.set()
    for task in tasks:
        await task
    assert entered == [0, 1, 2]


async def test_a_task_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    turns = Turns(1)
    line = _Line(turns)
    async with turns.turn("first"):
        cancelled = await line.join("leaves")
        waiting = await line.join("stays")
        cancelled.cancel()
    await waiting
    await (await line.join("later"))
    assert line.order == ["stays", "later"]


async def test_a_task_that_is_cancelled_as_it_gets_its_place_passes_it_on() -> None:
    """The place was given, but the task has not run since."""
    turns = Turns(1)
    line = _Line(turns)
    async with turns.turn("first"):
        cancelled = await line.join("leaves")
        waiting = await line.join("stays")
    cancelled.cancel()
    await waiting
    assert line.order == ["stays"]
