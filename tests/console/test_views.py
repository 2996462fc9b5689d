"""What pages compute of a batch."""

import pytest

from batchline.console.views import BatchViews
from batchline.domain.progress import Activity, Progress
from batchline.domain.records import Batch, Bill
from batchline.domain.states import BatchStatus

_BATCH = Batch(
    id="batch_1",
    project_id="p",
    key_id="k",
    endpoint="/v1/chat/completions",
    input_file_id="file-1",
    metadata=b"{}",
    status=BatchStatus.COMPLETED,
    created_at=0,
    expires_at=1,
    total=3,
    completed=3,
    input_tokens=10,
    model=None,
)
_BILL = Bill(cost=7, reused=2, saved=5)


@pytest.mark.parametrize(("metered", "cost", "saved"), [(True, 7, 5), (False, None, None)])
def test_a_cost_is_what_was_charged_also_for_several_models(metered: bool, cost: int | None, saved: int | None) -> None:
    """A tariff that changed later does not change what a batch has cost."""
    views = BatchViews(metered=metered)
    activity = Activity(in_flight=0, concurrency=0, waiting_for=None)
    progress = Progress(batch=_BATCH, rate=0.0, eta=None, activity=activity, errors=[], bill=_BILL)
    for view in (views.of_batch(_BATCH, _BILL), views.of_progress(progress, now=1.0)):
        assert (view.cost, view.reused, view.saved) == (cost, 2, saved)
    assert views.of_batch(_BATCH).cost is None
