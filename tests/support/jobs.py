"""Jobs of a batch, as a worker holds them."""

from batchline.domain.lines import Line
from batchline.domain.records import LeasedBatch, Shard
from batchline.pipeline.budget import Budgets
from batchline.pipeline.job import HeldBatch, HeldShard, Job

FAR_FUTURE = 10_000_000_000


def make_jobs(count: int, *, project_id: str = "p", expires_at: int = 1) -> list[Job]:
    """Return the jobs of one shard of one batch."""
    leased = LeasedBatch(
        id=f"batch_{project_id}",
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
        lines=count,
        model="",
        settled=bytes((count + 7) // 8),
        epoch=1,
        strikes=0,
    )
    held = HeldShard(shard, HeldBatch(leased, budget=Budgets(metered=False).of("o")))
    return [Job(Line(n, b'"%d"' % n, b'{"model":"m"}'), position=n, shard=held) for n in range(count)]
