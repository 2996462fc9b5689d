"""How long a lookup takes: 50,000 lines against 1,000,000 earlier answers (G7)."""

import asyncio
import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from batchline.domain.limits import InputLimits
from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.records import Batch, File, NewShard, Owner, Segment, ShardProgress
from batchline.domain.reuse import LineDigests, Place, StoredIndex, encode_index, place_of
from batchline.domain.states import BatchStatus, Reuse
from batchline.objects.local import LocalObjects
from batchline.pipeline.reuse import ReuseStep
from batchline.pipeline.validate import validate_file
from batchline.pipeline.validation_pool import ValidationPool
from batchline.ports import NewBatch, NewKey, Store
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemRandom, ThreadPool
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import SettableClock

CHAT = "/v1/chat/completions"
LINES, BATCHES = 50_000, 20
NOW = 1_800_000_000
EDITED = 500
ANSWER = "an answer of a usual length, which is repeated some times. " * 12


def body(n: int) -> bytes:
    message = {"role": "user", "content": f"question {n} " + "word " * 150}
    return json.dumps({"model": "m", "messages": [message]}, separators=(",", ":")).encode()


async def earlier(store: Store, objects: LocalObjects, owner: Owner, number: int) -> None:
    """Store a batch that has ended, with its output file and its index, but without an input."""
    batch_id = f"batch_{number:026}"
    batch = Batch(
        id=batch_id,
        project_id=owner.project_id,
        key_id=owner.key_id,
        endpoint=CHAT,
        input_file_id="file-in",
        metadata=b"{}",
        status=BatchStatus.VALIDATING,
        created_at=NOW + number,
        expires_at=NOW + 86_400,
        epoch=1,
    )
    await store.begin_batch(NewBatch(batch=batch, digest=b"%d" % number), owner="me", lease=60, since=0)
    shard = NewShard(offset=0, length=1, lines=LINES, model="m")
    await store.start_batch(batch_id, epoch=1, shards=[shard], total=LINES, work_key=f"work/{batch_id}/1", at=NOW)
    claim = await store.claim(owner="me", lease=60, lines=LINES, bytes=1 << 30, alone=True, at=NOW)
    [leased] = claim.shards
    all_set = ((1 << LINES) - 1).to_bytes((LINES + 7) // 8, "little")
    progress = ShardProgress(
        n=0, epoch=leased.epoch, former=leased.settled, settled=all_set, completed=LINES, failed=0, done=True
    )
    await store.record(
        batch_id, owner="me", progress=[progress], segment=Segment(output_bytes=1, error_bytes=0, data=b"+"), at=NOW
    )
    digests = LineDigests(owner.project_id, CHAT, None)
    response = json.dumps({"choices": [{"message": {"content": ANSWER}}], "usage": {"prompt_tokens": 1}}).encode()
    entries: list[tuple[bytes, Place]] = []
    key, offset = f"results/{batch_id}/1-me-output", 0
    lines: list[bytes] = []
    for n in range(LINES):
        line = b'{"id":"batch_req_%026d_%d","custom_id":"c%d","response":{"status_code":200,"request_id":null,' % (
            number,
            n,
            n,
        )
        line += b'"body":%b},"error":null}\n' % response
        entries.append((digests.of("m", body(number * LINES + n)), place_of(line, offset)))
        offset += len(line)
        lines.append(line)
    await objects.put(key, b"".join(lines))
    data = encode_index(entries)
    await objects.put(f"results/{batch_id}/index", data)
    finish = await store.lease_finalizable(owner="me", lease=60, at=NOW)
    assert finish is not None
    file = File(
        id=f"file-{number}",
        project_id=owner.project_id,
        filename="output.jsonl",
        purpose="batch_output",
        bytes=offset,
        created_at=NOW,
        expires_at=NOW * 2,
        is_error=False,
        object_key=key,
    )
    await store.publish(batch_id, epoch=finish.epoch, owner="me", files=[file], completed=LINES, failed=0, at=NOW)
    checksum = place_of(data, 0).checksum
    index = StoredIndex(lines=LINES, size=len(data), checksum=checksum, object_key=f"results/{batch_id}/index")
    assert await store.add_index(batch_id, index)


def _forget_peak() -> None:
    """Let the highest use of memory count from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> float:
    """Return a field of the status of this process, in MB."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


@pytest.mark.proof
def test_fifty_thousand_lines_against_a_million_answers(tmp_path: Path) -> None:
    with closing(ThreadPool(1, name="disk")) as threads:
        asyncio.run(_measure(tmp_path, threads))


async def _measure(folder: Path, threads: ThreadPool) -> None:
    clock = SettableClock(now=NOW + 100)
    database = SqliteDatabase(folder / "store.sqlite", clock=clock, writer=threads, reader=threads)
    store, objects = SqlStore(database), LocalObjects(folder / "objects", threads, SystemRandom())
    owner = await store.create_key(
        NewKey(
            key_id="key",
            digest=b"key",
            hint="",
            project="p",
            project_id="project",
            organization="o",
            organization_id="organization",
            at=NOW,
        )
    )
    for number in range(BATCHES):
        await earlier(store, objects, owner, number)
    lines = [body((BATCHES - 1) * LINES + n if n % (LINES // EDITED) else -n - 1) for n in range(LINES)]
    source, work = folder / "input.jsonl", folder / "work"
    text = b'{"custom_id":"d%d","method":"POST","url":"/v1/chat/completions","body":%b}\n'
    source.write_bytes(b"".join(text % (n, line) for n, line in enumerate(lines)))
    verdict = validate_file(source=source, work=work, endpoint=CHAT, limits=InputLimits())
    batch_id = f"batch_{99:026}"
    batch = Batch(
        id=batch_id,
        project_id=owner.project_id,
        key_id=owner.key_id,
        endpoint=CHAT,
        input_file_id="file-in",
        metadata=b"{}",
        status=BatchStatus.VALIDATING,
        created_at=NOW + 99,
        expires_at=NOW + 86_400,
        epoch=1,
        reuse=Reuse.LOOKUP,
    )
    await store.begin_batch(NewBatch(batch=batch, digest=b"99"), owner="me", lease=60, since=0)
    await objects.put("work/now/1", work.read_bytes())
    await store.start_batch(batch_id, epoch=1, shards=verdict.shards, total=LINES, work_key="work/now/1", at=NOW)
    leased = await store.lease_finalizable(owner="me", lease=60, at=NOW)
    assert leased is not None
    step = ReuseStep(
        store=store,
        objects=objects,
        validator=ValidationPool(),
        catalog=Catalog(),
        tariff=Tariff(metered=False, batch_percent=50),
        clock=clock,
        metrics=Metrics(),
        max_age_seconds=86_400,
        max_lines=2_000_000,
    )
    del lines
    _forget_peak()
    resident = _memory("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    await step.run(leased)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    grown = _memory("VmHWM") - resident
    seen = await store.batch(owner.project_id, batch_id)
    assert seen is not None
    assert seen.completed == LINES - EDITED
    print(
        f"\n{LINES} lines against {BATCHES * LINES} answers: {seconds:.2f} s, {cpu:.2f} s of CPU, {grown:.0f} MB more"
    )
    database.close()
    assert grown < 100
