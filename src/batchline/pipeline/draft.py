"""Lines gathered to be one segment, by shard: what they say, and what they come to."""

from collections import Counter, defaultdict

from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import Charge, ShardProgress
from batchline.domain.usage import Usage, total
from batchline.pipeline.claim import HeldShard, Job


class Draft:
    def __init__(self, *, since: float) -> None:
        self.since = since
        self.lines = self.bytes = self.cost = 0
        self._shares: dict[HeldShard, _Share] = {}

    def add(self, job: Job, line: bytes, *, usage: Usage | None, cost: int) -> None:
        """A line that failed has no usage."""
        share = self._shares.get(job.shard)
        if share is None:
            share = self._shares[job.shard] = _Share()
        share.settled |= 1 << job.position
        if usage is None:
            share.errors.append(line)
        else:
            share.output.append(line)
            share.usages[job.model.id].append(usage)
        if cost:
            share.costs[job.model.id] += cost
            self.cost += cost
        self.lines += 1
        self.bytes += len(line)

    def drop_lost(self) -> None:
        """Leave out the lines of shards that somebody else holds now."""
        for shard in [shard for shard in self._shares if shard.lost]:
            lost = self._shares.pop(shard)
            self.lines -= len(lost.output) + len(lost.errors)
            self.cost -= lost.costs.total()

    @property
    def shards(self) -> list[HeldShard]:
        return list(self._shares)

    @property
    def output(self) -> list[bytes]:
        return [line for share in self._shares.values() for line in share.output]

    @property
    def errors(self) -> list[bytes]:
        return [line for share in self._shares.values() for line in share.errors]

    @property
    def progress(self) -> list[ShardProgress]:
        return [share.progress(shard) for shard, share in self._shares.items()]

    @property
    def charges(self) -> list[Charge]:
        return [charge for share in self._shares.values() for charge in share.charges]

    @property
    def failures(self) -> list[LineErrors]:
        return count_errors(self.errors)

    def settle_shards(self) -> None:
        """It was recorded."""
        for shard, share in self._shares.items():
            shard.settled |= share.settled


class _Share:
    """What one shard has in it."""

    def __init__(self) -> None:
        self.settled = 0
        self.output: list[bytes] = []
        self.errors: list[bytes] = []
        self.usages: defaultdict[str, list[Usage]] = defaultdict(list)
        """Of answers, by model."""
        self.costs: Counter[str] = Counter()

    @property
    def charges(self) -> list[Charge]:
        return [
            Charge(model=model, requests=len(usages), usage=total(usages), cost=self.costs[model])
            for model, usages in self.usages.items()
        ]

    def progress(self, shard: HeldShard) -> ShardProgress:
        settled = shard.settled | self.settled
        return ShardProgress(
            n=shard.n,
            epoch=shard.epoch,
            settled=settled.to_bytes((shard.lines + 7) // 8, "little"),
            completed=len(self.output),
            failed=len(self.errors),
            usage=total([charge.usage for charge in self.charges]),
            done=settled == shard.all_settled,
        )
