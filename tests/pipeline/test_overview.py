"""What runs over all projects: the state of upstreams."""

import pytest

from batchline.domain.fleet import ModelQueue, Report, UpstreamLoad
from batchline.domain.progress import Pause
from batchline.pipeline.overview import UpstreamsReader, WaitingLines

pytestmark = pytest.mark.anyio

_EARLY, _LATE = (Pause(upstream="gpu", detail="refused", since=since) for since in (5, 9))
_OF_MODEL = Pause(upstream="gpu", model="m", detail="http_503", since=7)


class _Workers:
    async def reports(self) -> list[Report]:
        return [
            Report(owner="api", runs_batches=False, upstream_loads={"gpu": UpstreamLoad(sync_calls=9)}),
            _report("one", pauses=[_LATE, _OF_MODEL], rate=2.5, hold="storage"),
            _report("two", pauses=[_EARLY]),
        ]


def _report(owner: str, **fields: object) -> Report:
    queues = {"m": ModelQueue(reason="slots", lines=4), owner: ModelQueue(reason="retry_after", lines=9)}
    load = UpstreamLoad(in_flight=2, limit=8, sync_calls=1, queues=queues, **fields)  # type: ignore[arg-type]
    return Report(owner=owner, runs_batches=True, upstream_loads={"gpu": load})


async def test_the_reports_of_all_workers_add_up_to_the_state_of_an_upstream() -> None:
    reader = UpstreamsReader(workers=_Workers(), names=["idle"])
    gpu, idle = await reader.upstreams()
    assert (gpu.name, gpu.workers, gpu.in_flight, gpu.sync_calls, gpu.limit, gpu.rate) == ("gpu", 2, 4, 2, 16, 2.5)
    assert gpu.pauses == [_EARLY, _OF_MODEL]
    assert gpu.holds == ["storage"]
    assert gpu.waiting == [
        WaitingLines(model="one", reason="retry_after", lines=9),
        WaitingLines(model="two", reason="retry_after", lines=9),
        WaitingLines(model="m", reason="slots", lines=8),
    ]
    assert (idle.name, idle.workers, idle.limit) == ("idle", 0, 0)
    assert await reader.workers() == 2
