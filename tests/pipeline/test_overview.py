"""What runs over all projects: the open batches, and the state of upstreams."""

from typing import cast

import pytest

from batchline.domain.fleet import ModelQueue, Report, UpstreamLoad
from batchline.domain.progress import Pause
from batchline.domain.records import Batch, Project
from batchline.pipeline.overview import UpstreamsReader, WaitingLines, open_batches
from batchline.ports import Store
from tests.support.records import make_batch

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


class _Store:
    """Has one project with a batch. After the first read, a second one is created, and the first one may be deleted."""

    def __init__(self, *, deletes: bool) -> None:
        self._deletes, self._ids = deletes, ["first"]

    def _read(self) -> list[str]:
        found, self._ids = self._ids, ["second"] if self._deletes else ["first", "second"]
        return found

    async def projects(self) -> list[Project]:
        return [
            Project(id=each, name=each, organization_id="o", organization="o", created_at=1) for each in self._read()
        ]

    async def open_batches(self, *, limit: int) -> list[Batch]:
        return [make_batch(id=f"batch_{each}", project_id=each) for each in self._read()]


@pytest.mark.parametrize(("deletes", "found"), [(False, ["batch_first"]), (True, [])])
async def test_projects_may_come_and_go_while_the_open_batches_are_listed(deletes: bool, found: list[str]) -> None:
    listed = await open_batches(cast("Store", _Store(deletes=deletes)), limit=9)
    assert [(project.id, batch.id) for project, batch in listed] == [(each[6:], each) for each in found]
