"""Remembers the load of the upstreams in the last hour, and the lines in flight of each batch.

A process that serves pages takes a sample of the reports of all workers every few seconds. It remembers only its own
samples, so after its start there are none yet.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from batchline.domain.fleet import Report
from batchline.domain.progress import BUCKET_SECONDS, KEPT_SECONDS, bucket_of
from batchline.pipeline.progress import Workers
from batchline.ports import Clock

SAMPLE_SECONDS = float(BUCKET_SECONDS)
"""The time between two samples. The recorded lines of a batch are counted as often, so that both fit in one chart."""
HISTORY_SECONDS = 3600
_MAX_SAMPLES = HISTORY_SECONDS // BUCKET_SECONDS
_MAX_BATCH_SAMPLES = KEPT_SECONDS // BUCKET_SECONDS


class UpstreamSample(Struct, frozen=True, kw_only=True):
    """An upstream at one moment, as all workers see it, and its attempts since the sample before."""

    at: int
    in_flight: int
    limit: int
    attempts: int
    seconds: float
    """The sum of the seconds that these attempts took."""


class BatchSample(Struct, frozen=True, kw_only=True):
    """The lines of a batch in flight at one moment, and the limit of the upstreams that serve it."""

    at: int
    in_flight: int
    limit: int


class _BatchLoads(Struct, frozen=True, kw_only=True):
    """The lines in flight by batch, and the limits by upstream, at one moment."""

    at: int
    in_flight: Mapping[str, int]
    limits: Mapping[str, int]


class LoadHistory:
    """Takes the samples, and returns them."""

    def __init__(self, *, workers: Workers, clock: Clock) -> None:
        self._workers, self._clock = workers, clock
        self._upstreams: dict[str, deque[UpstreamSample]] = {}
        self._batches: deque[_BatchLoads] = deque(maxlen=_MAX_BATCH_SAMPLES)
        self._totals: dict[tuple[str, str], tuple[int, float]] = {}
        """The attempts and their seconds that each process last reported, by process and upstream."""

    async def step(self) -> bool:
        """Take a sample."""
        reports = [report for report in await self._workers.reports() if report.runs_batches]
        at = bucket_of(self._clock.now())
        limits: Counter[str] = Counter()
        for name in {name for report in reports for name in report.upstream_loads}:
            sample = self._sample(name, reports, at=at)
            limits[name] = sample.limit
            self._upstreams.setdefault(name, deque(maxlen=_MAX_SAMPLES)).append(sample)
        in_flight: Counter[str] = Counter()
        for report in reports:
            in_flight.update(report.batches)
        self._batches.append(_BatchLoads(at=at, in_flight=in_flight, limits=limits))
        self._totals = {
            (report.owner, name): (load.attempts, load.attempt_seconds)
            for report in reports
            for name, load in report.upstream_loads.items()
        }
        return False

    def upstream(self, name: str) -> Sequence[UpstreamSample]:
        """Return the samples of an upstream, oldest first."""
        return list(self._upstreams.get(name, ()))

    def batch(self, batch_id: str, upstreams: Collection[str]) -> list[BatchSample]:
        """Return the samples of a batch that these upstreams serve, oldest first, none older than five minutes."""
        return [
            BatchSample(
                at=loads.at,
                in_flight=loads.in_flight.get(batch_id, 0),
                limit=sum(limit for name, limit in loads.limits.items() if name in upstreams),
            )
            for loads in self._batches
        ]

    def _sample(self, name: str, reports: Sequence[Report], *, at: int) -> UpstreamSample:
        loads = [(report.owner, report.upstream_loads[name]) for report in reports if name in report.upstream_loads]
        attempts, seconds = 0, 0.0
        for owner, load in loads:
            # The counts of a process that was not seen before may be hours old, so they do not count as new.
            former = self._totals.get((owner, name), (load.attempts, load.attempt_seconds))
            attempts += max(0, load.attempts - former[0])
            seconds += max(0.0, load.attempt_seconds - former[1])
        return UpstreamSample(
            at=at,
            in_flight=sum(load.in_flight for _, load in loads),
            limit=sum(load.limit for _, load in loads),
            attempts=attempts,
            seconds=seconds,
        )
