"""Jobs of a batch, as a worker holds them."""

from itertools import count

from batchline.domain.lines import Line
from batchline.domain.models import Model
from batchline.domain.records import LeasedBatch, Shard
from batchline.pipeline.budget import Budgets
from batchline.pipeline.job import HeldBatch, HeldShard, Job

FAR_FUTURE = 10_000_000_000

_batch_numbers = count(1)


def make_jobs(lines: int, *, project_id: str = "p", model: str = "m", expires_at: int = 1) -> list[Job]:
    """Return the jobs of one shard of a new batch. Their bodies name the project and the line."""
    leased = LeasedBatch(
        id=f"batch_{next(_batch_numbers)}",
        project_id=project_id,
        organization_id="o",
        endpoint="/v1",
        expires_at=expires_at,
        work_key="w",
        key_revoked=False,
        funds=0,
    )
    shard = Shard(
        batch_id=leased.id,
        n=0,
        offset=0,
        length=1,
        lines=lines,
        model="",
        settled=bytes((lines + 7) // 8),
        epoch=1,
        strikes=0,
    )
    held = HeldShard(shard, HeldBatch(leased, budget=Budgets(metered=False).of("o")))
    return [_job(n, model, held) for n in range(lines)]


def _job(number: int, model: str, shard: HeldShard) -> Job:
    batch = shard.batch
    body = f'{{"model":"{model}","project":"{batch.project_id}","line":"{batch.id} {number}"}}'.encode()
    job = Job(Line(number, b'"%d"' % number, body), position=number, shard=shard)
    job.model = Model(id=model, name=model)
    return job
