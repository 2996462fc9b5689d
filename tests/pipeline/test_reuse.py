"""Lines that take answers which their project got before (G7)."""

import asyncio
import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import ObjectsDown
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from batchline.fsck.check import Fsck
from batchline.fsck.findings import Checked
from batchline.pipeline import reuse as pipeline_reuse
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.validation_pool import ValidationDied
from tests.simulation.virtual import InlineValidator
from tests.support.earlier_copies import bring_back, copy_of
from tests.support.engine_harness import Bench

PRICED: dict[str, Any] = {"metering": True, "models": {"m": {"input_price": "2", "output_price": "2"}}}
LINES = 300


def asked(bench: Bench) -> int:
    """Return the number of requests that any upstream got."""
    return sum(times for machine in bench.machines.values() for times in machine.starts.values())


def without_ids(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("id", "custom_id", "reused")}


async def reused(bench: Bench, batch: Batch) -> int:
    """Return how many lines took an earlier answer, and check that the ledger and the files say the same."""
    records = (await bench.records(batch)).values()
    marked = [record for record in records if record.get("reused")]
    entries = await bench.rows.project_usage(
        batch.project_id, model=None, since=0, until=10**10, bucket_seconds=86_400, limit=100
    )
    assert sum(entry.reused for entry in entries) >= len(marked)
    snapshot = await bench.rows.snapshot(batch.project_id, batch.id)
    assert snapshot is not None
    assert snapshot.bill.reused == len(marked)
    return len(marked)


@pytest.mark.rule("G7", "Lines with the url and body of a line that succeeded take its answer, without a request.")
def test_a_batch_that_is_run_again_asks_only_for_what_was_edited(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, **PRICED)) as bench:

        async def scene() -> None:
            await bench.fund(10**12)
            prompts = [f"word number {n}" for n in range(LINES)]
            first = await bench.ended(await bench.batch(prompts))
            asked_first, funds = asked(bench), await bench.funds()
            prompts[7] = "another question"
            prompts[200] = "and one more"
            second = await bench.ended(await bench.batch(prompts, reuse=True))
            assert (second.status, second.completed, second.failed) == (BatchStatus.COMPLETED, LINES, 0)
            assert asked(bench) - asked_first == 2
            assert await reused(bench, second) == LINES - 2
            before, after = await bench.records(first), await bench.records(second)
            for name in before.keys() - {"line-7", "line-200"}:
                assert without_ids(after[name]) == without_ids(before[name])
                assert after[name]["id"].startswith(second.id.replace("batch_", "batch_req_"))
                assert list(after[name]) == ["id", "custom_id", "response", "error", "reused"]
            ran = [after[name]["response"]["body"]["usage"]["total_tokens"] for name in ("line-7", "line-200")]
            assert funds - await bench.funds() == 1000 * sum(ran)
            assert second.input_tokens + second.output_tokens == sum(ran)
            third = await bench.ended(await bench.batch(prompts, reuse=True))
            assert asked(bench) - asked_first == 2
            assert await reused(bench, third) == LINES

        bench.play(scene())


@pytest.mark.rule("G7", "Nothing is built while nobody asks for a reuse.")
def test_nothing_is_built_while_nobody_reuses(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(LINES)]
            for _ in range(2):
                await bench.ended(await bench.batch(prompts))
            indexes = list((tmp_path / "objects").rglob("*index*"))
            sources = await bench.rows.reuse_sources(
                (await bench.rows.projects())[0].id, endpoint="/v1/chat/completions", since=0, at=0, limit=10
            )
            assert [source.index_bytes for source in sources] == [None, None]
            assert indexes == []
            assert asked(bench) == 2 * LINES

        bench.play(scene())


@pytest.mark.rule("G7", "Of equal lines in one batch one runs, and the others take its answer.")
def test_equal_lines_run_once(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            bodies = [_chat(f"question {n % 20}") for n in range(LINES)]
            batch = await bench.ended(await bench.batch_of(bodies, reuse=True))
            assert (batch.completed, batch.failed) == (LINES, 0)
            assert asked(bench) == 20
            assert await reused(bench, batch) == LINES - 20

        bench.play(scene())


@pytest.mark.rule("G7", "If the line that runs fails, the lines that are equal to it run.")
def test_lines_run_if_the_one_that_they_are_equal_to_fails(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            bodies = [_chat("[[status=400]] wrong") for _ in range(10)] + [_chat("right") for _ in range(10)]
            batch = await bench.ended(await bench.batch_of(bodies, reuse=True))
            assert (batch.completed, batch.failed) == (10, 10)
            assert asked(bench) == 11
            assert await reused(bench, batch) == 9

        bench.play(scene())


@pytest.mark.rule("G7", "Answers are never shared across projects.")
def test_another_project_gets_answers_of_its_own(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(40)]
            await bench.ended(await bench.batch(prompts))
            other = await bench.ended(await bench.batch(prompts, project="beta", reuse=True))
            assert (other.completed, asked(bench), await reused(bench, other)) == (40, 80, 0)

        bench.play(scene())


@pytest.mark.rule("G7", "Results that were deleted are not reused.")
@pytest.mark.parametrize("indexed", [False, True])
def test_deleted_results_are_not_reused(tmp_path: Path, indexed: bool) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(40)]
            first = await bench.ended(await bench.batch(prompts))
            if indexed:
                again = await bench.ended(await bench.batch(prompts, reuse=True))
                assert await reused(bench, again) == 40
            before = asked(bench)
            await bench.rows.delete_file(first.project_id, str(first.output_file_id), at=0)
            batch = await bench.ended(await bench.batch(prompts, reuse=True))
            assert (batch.completed, asked(bench) - before, await reused(bench, batch)) == (40, 40, 0)

        bench.play(scene())


@pytest.mark.rule("G7", "Results that are deleted while they are copied are not reused.")
def test_results_that_are_deleted_during_the_lookup_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answers are copied already when the file goes. These are not recorded either."""
    monkeypatch.setattr(pipeline_reuse, "_READ_BYTES", 1)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(40)]
            first = await bench.ended(await bench.batch(prompts))
            reads = 0

            async def delete_after_some(key: str, *_: int) -> None:
                nonlocal reads
                if not key.endswith("-output"):
                    return
                reads += 1
                if reads == 20:
                    await bench.rows.delete_file(first.project_id, str(first.output_file_id), at=0)
                    await bench.objects.delete(key)

            bench.objects.trouble["read"] = delete_after_some
            batch = await bench.ended(await bench.batch(prompts, reuse=True))
            assert reads == 20
            assert (batch.completed, asked(bench), await reused(bench, batch)) == (40, 80, 0)

        bench.play(scene())


@pytest.mark.rule("G7", "Lines run if earlier answers cannot be read.")
@pytest.mark.parametrize(("call", "running"), [("read", 20), ("digests", 40)])
def test_lines_run_if_the_answers_of_an_earlier_batch_stay_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, running: int
) -> None:
    """A disk may fail at one place, or a bucket refuse one object. Answers of other batches are still reused."""
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(40)]
            await bench.ended(await bench.batch(prompts[:20]))
            newest = await bench.ended(await bench.batch(prompts[20:]))
            if call == "read":

                async def fail(key: str, *_: int) -> None:
                    if key.startswith(f"results/{newest.id}/"):
                        raise ObjectsDown("Input/output error")

                bench.objects.trouble["read"] = fail
            else:

                async def die(*_: Any, **__: Any) -> bytes:
                    raise ValidationDied("Two processes died over one input file")

                monkeypatch.setattr(InlineValidator, "digests", die)
            ended = await bench.ended(await bench.batch(prompts, reuse=True))
            assert (ended.completed, ended.failed, asked(bench)) == (40, 0, 40 + running)
            assert int(str(ended.completed_at)) - ended.created_at < 300

        bench.play(scene())


@pytest.mark.rule("G7", "Nothing expires while the clock is held, so the answers are reused.")
def test_answers_are_reused_while_the_clock_is_held(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, file_retention_seconds=600)) as bench:

        async def scene() -> None:
            clock: Any = bench.engine.api_role.services.clock
            prompts = [f"word number {n}" for n in range(40)]
            await bench.ended(await bench.batch(prompts))
            clock.seconds_behind = 100_000.0
            await clock.sleep(900)
            batch = await bench.ended(await bench.batch(prompts, reuse=True))
            assert (batch.completed, asked(bench), await reused(bench, batch)) == (40, 40, 40)

        bench.play(scene(), seconds=10_000)


@pytest.mark.parametrize("earlier", [False, True], ids=["of the same batch", "of an earlier batch"])
def test_copies_of_a_large_answer_are_written_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """However many equal lines take it, no more copies are in memory than a segment has."""
    monkeypatch.setattr(pipeline_reuse, "_SEGMENT_BYTES", 4096)
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            bodies = [_chat("one question")] * 200
            if earlier:
                await bench.ended(await bench.batch_of(bodies[:1]))
            batch = await bench.ended(await bench.batch_of(bodies, reuse=True))
            assert (batch.completed, asked(bench)) == (200, 1)
            segments = await bench.rows.segments(batch.id, after=0, limit=1000)
            assert max(segment.output_bytes for segment in segments) < 2 * 4096

        bench.play(scene())


def test_failed_lines_and_other_bodies_are_not_reused(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            bodies = [_chat("[[status=400]] wrong"), _chat("right"), _chat("warm", temperature=1)]
            await bench.ended(await bench.batch_of(bodies))
            bodies[2] = _chat("warm", temperature=0)
            batch = await bench.ended(await bench.batch_of(bodies, reuse=True))
            assert (batch.completed, batch.failed, asked(bench)) == (2, 1, 5)

        bench.play(scene())


@pytest.mark.rule("G7", "A model that was taken away is refused.")
def test_a_model_that_was_taken_away_is_refused(tmp_path: Path) -> None:
    prompts = [f"word number {n}" for n in range(40)]
    with closing(Bench(tmp_path, models={"m": {}, "n": {}})) as bench:
        bench.play(_run(bench, prompts))
        bench.kill()
        bench._settings = bench._settings.model_copy(update={"models": {"n": bench._settings.models["n"]}})
        bench.start()

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(prompts, reuse=True))
            assert (batch.completed, batch.failed) == (0, 40)
            assert "does not exist" in next(iter((await bench.failures(batch)).values()))

        bench.play(scene())


def test_a_model_that_is_sent_by_another_name_now_is_asked_again(tmp_path: Path) -> None:
    prompts = [f"word number {n}" for n in range(40)]
    with closing(Bench(tmp_path, models={"m": {"name": "org/m-7b"}})) as bench:
        bench.play(_run(bench, prompts))
        bench.play(_run(bench, prompts, reuse=True))
        assert asked(bench) == 40
        bench.kill()
        renamed = bench._settings.models["m"].model_copy(update={"name": "org/m-8b"})
        bench._settings = bench._settings.model_copy(update={"models": {"m": renamed}})
        bench.start()
        bench.play(_run(bench, prompts, reuse=True))
        assert asked(bench) == 80


@pytest.mark.rule("G7", "Answers of batches whose work was deleted are reused, as long as their files are there.")
def test_answers_are_reused_after_the_work_of_their_batch_was_deleted(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, work_retention_seconds=0)) as bench:
        prompts = [f"word number {n}" for n in range(40)]

        async def scene() -> None:
            first = await bench.ended(await bench.batch(prompts))
            while await bench.rows.batch_shards(first.id):
                await bench.until(first, lambda _: True)
                await bench.engine.api_role.services.clock.sleep(1)
            batch = await bench.ended(await bench.batch(prompts, reuse=True))
            assert (batch.completed, asked(bench), await reused(bench, batch)) == (40, 40, 40)

        bench.play(scene())


@pytest.mark.parametrize(
    "steps",
    [5, 80, 160, 300, 600, *(pytest.param(steps, marks=pytest.mark.proof) for steps in (40, 120, 200, 400))],
)
def test_a_crash_during_a_reuse_loses_and_repeats_nothing(tmp_path: Path, steps: int) -> None:
    with closing(Bench(tmp_path, **PRICED)) as bench:
        prompts = [f"question {n}" for n in range(60)]

        async def begin() -> Batch:
            await bench.fund(10**12)
            await bench.ended(await bench.batch(prompts))
            bodies = [_chat(prompt) for prompt in prompts] + [_chat(f"new {n % 5}") for n in range(40)]
            return await bench.batch_of(bodies, reuse=True)

        batch = bench.play(begin())
        for _ in range(steps):
            bench._step(bench.time.now + 1000)
        bench.kill()
        bench.start()

        async def end() -> None:
            ended = await bench.ended(batch)
            assert (ended.completed, ended.failed) == (100, 0)
            assert await reused(bench, ended) == 95
            entries = [entry for entry in await bench.rows.usage(since=0, until=10**10) if entry.batch_id == batch.id]
            assert sum(entry.requests for entry in entries) == 5

        bench.play(end())


@pytest.mark.rule("G7", "Reuse and a hold go together.")
def test_a_batch_with_a_hold_reuses_answers(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(LINES)]
            await bench.ended(await bench.batch(prompts))
            few = [*prompts[:3], *(f"[[status=400]] {n}" for n in range(LINES))]
            held = await bench.until(
                await bench.batch(few, reuse=True, hold=True), lambda seen: seen.is_held or seen.failed > 200
            )
            assert held.is_held
            assert held.completed == 3
            assert asked(bench) <= LINES + 64
            whole = await bench.ended(await bench.batch(prompts, reuse=True, hold=True))
            assert await reused(bench, whole) == LINES

        bench.play(scene())


@pytest.mark.rule("G7", "Lines of a batch that is stopped take the answer of an equal line that succeeded before.")
def test_lines_of_a_stopped_batch_take_the_answers_that_it_got(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            bodies = [_chat("right") for _ in range(10)] + [_chat("[[hang]] never") for _ in range(10)]
            batch = await bench.until(await bench.batch_of(bodies, reuse=True), lambda seen: seen.completed > 0)
            assert (batch.completed, batch.failed) == (1, 0)
            await bench.rows.cancel_batch(batch.project_id, batch.id, at=int(bench.time.now))
            ended = await bench.ended(batch)
            assert ended.status is BatchStatus.CANCELLED
            assert (ended.completed, ended.failed) == (10, 10)
            assert await reused(bench, ended) == 9

        bench.play(scene())


def test_a_batch_that_is_cancelled_before_its_lookup_ends(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            prompts = [f"word number {n}" for n in range(40)]
            batch = await bench.batch(prompts, reuse=True)
            await bench.rows.cancel_batch(batch.project_id, batch.id, at=int(bench.time.now))
            ended = await bench.ended(batch)
            assert ended.status is BatchStatus.CANCELLED
            assert ended.completed + ended.failed == 40

        bench.play(scene())


def test_fsck_finds_nothing_wrong_with_batches_that_reuse_answers(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=2.0, **PRICED)) as bench:

        async def check() -> list[str]:
            services = bench.engine.api_role.services
            fsck = Fsck(
                store=bench.rows,
                objects=bench.objects,
                identity=services.identity,
                damage_log=DamageLog(bench.metrics),
                clock=services.clock,
                work_retention_seconds=86_400,
                checked=Checked(),
            )
            return [finding.problem for finding in (await fsck.run(repair=False)).findings]

        async def scene() -> None:
            await bench.fund(10**12)
            prompts = [f"question {n}" for n in range(60)]
            await bench.ended(await bench.batch(prompts))
            bodies = [_chat(prompt) for prompt in prompts] + [_chat(f"new {n % 5}") for n in range(40)]
            batch = await bench.batch_of(bodies, reuse=True)
            assert await check() == []
            await bench.until(batch, lambda seen: seen.completed >= 60)
            assert await check() == []
            await bench.ended(batch)
            assert await check() == []

        bench.play(scene())


@pytest.mark.rule("C12", "A batch that the database loses while its lines take answers is a lost lease.")
@pytest.mark.parametrize("call", ["signals", "reuse_sources", "end_reuse_step"])
def test_a_batch_that_is_lost_during_a_step_is_a_lost_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """D5: the database goes back to a state before the batch was created. That is no error of the program."""
    database = tmp_path / "store.sqlite"
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            await bench.ended(await bench.batch(["question"]))
            earlier, created, lost = copy_of(database), asyncio.Event(), asyncio.Event()

            async def go_back(first: object, *_: Any, **__: Any) -> None:
                if first and not lost.is_set():
                    await created.wait()
                    bring_back(earlier, database)
                    lost.set()

            bench.store.trouble[call] = go_back
            await bench.batch(["question", "another"], reuse=True)
            created.set()
            await lost.wait()
            again = await bench.ended(await bench.batch(["question", "another"], reuse=True))
            assert (again.completed, await reused(bench, again)) == (2, 1)

        bench.play(scene(), seconds=100)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def _chat(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}


async def _run(bench: Bench, prompts: list[str], **options: Any) -> None:
    batch = await bench.ended(await bench.batch(prompts, **options))
    assert batch.completed == len(prompts), json.dumps(await bench.failures(batch))[:500]
