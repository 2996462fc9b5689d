"""Validation in child processes: they do the same work, die with their parent, and are replaced when they die."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.domain.limits import InputLimits
from batchline.pipeline.validate import validate_file
from batchline.pipeline.validation_pool import ValidationDied, ValidationPool
from batchline.ports import Verdict

CHAT = "/v1/chat/completions"
GOOD = b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}\n'
BOM = b"\xef\xbb\xbf"
"""In front of a line it spares the reader going back to the start, which a pipe cannot."""
GUARD_SECONDS = 60
"""Only so that a test of what must happen fails instead of hanging when it does not."""


_children_of_others: list[Any] = []


@pytest.fixture(autouse=True)
def _note_children_of_others() -> None:
    """Services that other tests keep running in this process have children too."""
    _children_of_others[:] = active_children()


def own_children() -> list[Any]:
    return [child for child in active_children() if child not in _children_of_others]


@asynccontextmanager
async def opened(count: int = 1) -> AsyncIterator[ValidationPool]:
    children = ValidationPool(count)
    try:
        yield children
    finally:
        children.close()


async def validate(children: ValidationPool, source: Path, *, project_id: str = "p") -> Verdict:
    work = source.with_suffix(".work")
    return await children.validate(project_id=project_id, source=source, work=work, endpoint=CHAT, limits=InputLimits())


def good_file(folder: Path, lines: int = 3) -> Path:
    path = folder / "good.jsonl"
    path.write_bytes(b"".join(GOOD % n for n in range(lines)))
    return path


class Stalled:
    """An input file that keeps whoever reads it waiting: a pipe nothing is written to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stalled.jsonl"
        os.mkfifo(self.path)

    async def wait_for_reader(self, reading: "asyncio.Future[Any]") -> int:
        while not reading.done():
            with suppress(OSError):  # as long as nobody reads
                return os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.01)
        raise AssertionError("ended without a reader")

    async def kill_reader(self, reading: "asyncio.Future[Any]") -> None:
        descriptor = await self.wait_for_reader(reading)
        (child,) = own_children()
        child.kill()
        await asyncio.to_thread(reader_is_gone, descriptor)
        os.close(descriptor)

    def replace_by(self, other: Path) -> None:
        other.replace(self.path)


def reader_is_gone(descriptor: int) -> bool:
    watch = select.poll()
    watch.register(descriptor, 0)
    return bool(watch.poll(GUARD_SECONDS * 1000))


def test_the_verdict_is_the_same_as_in_this_process(tmp_path: Path) -> None:
    """C2, C7: shards or faults, and the work file, whoever wrote it."""
    good, bad = good_file(tmp_path, 1000), tmp_path / "bad.jsonl"
    bad.write_bytes(b"1\n\n{\n")

    async def story() -> list[Verdict]:
        async with opened() as children:
            return [await validate(children, good), await validate(children, bad)]

    verdicts = asyncio.run(story())
    own = tmp_path / "own"
    assert (
        verdicts
        == [validate_file(source=source, work=own, endpoint=CHAT, limits=InputLimits()) for source in (bad, good)][::-1]
    )
    assert good.with_suffix(".work").read_bytes() == own.read_bytes()


def test_children_start_when_needed_and_end_at_close(tmp_path: Path) -> None:
    """One child serves one file after the other; none is left behind."""

    async def story() -> None:
        async with opened() as children:
            assert own_children() == []
            await validate(children, good_file(tmp_path))
            first = own_children()
            await validate(children, good_file(tmp_path))
            assert own_children() == first
            assert len(first) == 1
        assert own_children() == []

    asyncio.run(story())


def test_the_first_file_finds_a_child_that_was_started_before(tmp_path: Path) -> None:
    """The first create after a start takes no longer than the next ones."""

    async def story() -> None:
        async with opened() as children:
            children.start()
            started = own_children()
            assert len(started) == 1
            await validate(children, good_file(tmp_path))
            assert own_children() == started

    asyncio.run(story())


def test_files_wait_for_a_free_child(tmp_path: Path) -> None:
    """More files than children at once: all get their verdict, with no more processes than asked for."""

    async def story() -> None:
        async with opened(2) as children, asyncio.TaskGroup() as group:
            good = good_file(tmp_path)
            calls = [group.create_task(validate(children, good)) for _ in range(6)]
            verdicts = [await call for call in calls]
            assert [verdict.lines for verdict in verdicts] == [3] * 6
            assert len(own_children()) == 2

    asyncio.run(story())


def test_a_child_that_dies_idle_is_replaced(tmp_path: Path) -> None:
    """The next file does not notice."""

    async def story() -> None:
        async with opened() as children:
            await validate(children, good_file(tmp_path))
            (child,) = own_children()
            child.kill()
            assert (await validate(children, good_file(tmp_path))).lines == 3
            assert own_children() != [child]

    asyncio.run(story())


def test_a_file_whose_child_died_is_tried_once_more(tmp_path: Path) -> None:
    """C7: a killed child (out of memory, say) costs a create nothing but time."""

    async def story() -> None:
        stalled = Stalled(tmp_path)
        async with opened() as children, asyncio.TaskGroup() as group:
            call = group.create_task(validate(children, stalled.path))
            descriptor = await stalled.wait_for_reader(call)
            (child,) = own_children()
            stalled.replace_by(good_file(tmp_path))
            child.kill()
            assert (await call).lines == 3
            os.close(descriptor)

    asyncio.run(story())


def test_two_deaths_are_an_error_and_hurt_no_other_file(tmp_path: Path) -> None:
    """D5, in its spirit: a file that kills its child twice fails, the one waiting behind it does not."""

    async def story() -> None:
        stalled = Stalled(tmp_path)
        async with opened() as children:
            deadly = asyncio.create_task(validate(children, stalled.path))
            behind = asyncio.create_task(validate(children, good_file(tmp_path)))
            await stalled.kill_reader(deadly)
            await stalled.kill_reader(deadly)
            with pytest.raises(ValidationDied):
                await deadly
            assert (await behind).lines == 3

    asyncio.run(story())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What is started in the background of a shell ignores SIGINT from the start, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_from_the_terminal_is_the_parents_business(tmp_path: Path) -> None:
    """F5: Ctrl-C reaches the whole group; a file being validated is finished."""

    async def story() -> int:
        stalled = Stalled(tmp_path)
        async with opened() as children:
            call = asyncio.create_task(validate(children, stalled.path))
            descriptor = await stalled.wait_for_reader(call)
            (child,) = own_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGINT)
            os.write(descriptor, BOM + GOOD % 1)
            os.close(descriptor)
            return (await call).lines

    try:
        assert asyncio.run(story()) == 1
    except KeyboardInterrupt:
        pytest.fail("the interrupt reached the child")


def test_faults_of_the_disk_have_their_names(tmp_path: Path) -> None:
    """C2, A6: a missing input is told from a disk that fails."""

    async def story() -> None:
        async with opened() as children:
            with pytest.raises(ObjectMissing):
                await validate(children, tmp_path / "missing.jsonl")
            nowhere, good = tmp_path / "no" / "such" / "folder", good_file(tmp_path)
            with pytest.raises(ObjectsDown):
                await children.validate(project_id="p", source=good, work=nowhere, endpoint=CHAT, limits=InputLimits())

    asyncio.run(story())


PARENT = f"""
import asyncio, sys
from pathlib import Path
from batchline.pipeline.validation_pool import ValidationPool
from batchline.domain.limits import InputLimits

print("main runs", flush=True)

if __name__ == "__main__":
    source = Path(sys.argv[1])
    call = ValidationPool().validate(
        project_id="p",
        source=source,
        work=source.with_suffix(".work"),
        endpoint="{CHAT}",
        limits=InputLimits(),
    )
    asyncio.run(call)
"""


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """D5: a parent that gets SIGKILL leaves no process behind that still writes to its folder."""
    stalled = Stalled(tmp_path)
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, script, stalled.path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        descriptor = os.open(stalled.path, os.O_WRONLY)
        parent.kill()
        assert reader_is_gone(descriptor)
        os.close(descriptor)


def test_a_child_does_not_run_the_parents_script(tmp_path: Path) -> None:
    """C6: a child imports what validation needs, not the service that started it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run([sys.executable, script, good_file(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["main runs"]
    assert done.stderr == ""


def test_a_child_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """F1: a file that lies there under the name of a module is not run."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    (folder := tmp_path / "current").mkdir()
    for name in ("pickle", "msgspec", "multiprocessing"):
        (folder / f"{name}.py").write_text("import os; os._exit(7)")
    good = good_file(tmp_path)
    subprocess.run([sys.executable, script, good], check=True, cwd=folder, capture_output=True)
    assert good.with_suffix(".work").exists()


@pytest.mark.rule("D8", "A file to validate does not wait behind many files of another project.")
def test_projects_take_turns(tmp_path: Path) -> None:
    """D8: of six files of one project and one of another, that one is second."""

    async def story() -> None:
        async with opened() as children:
            ended: list[str] = []

            async def run(source: Path, project_id: str) -> None:
                await validate(children, source, project_id=project_id)
                ended.append(project_id)

            good, stalled = good_file(tmp_path), Stalled(tmp_path)
            async with asyncio.TaskGroup() as group:
                first = group.create_task(run(stalled.path, "many"))
                descriptor = await stalled.wait_for_reader(first)
                for _ in range(5):
                    group.create_task(run(good, "many"))
                left = group.create_task(run(good, "left"))
                group.create_task(run(good, "few"))
                group.create_task(run(good, "few"))
                await asyncio.sleep(0)
                left.cancel()
                os.write(descriptor, BOM + GOOD % 0)
                os.close(descriptor)
            assert ended == ["many", "many", "few", "many", "few", "many", "many", "many"]
            await validate(children, good)

    asyncio.run(story())
