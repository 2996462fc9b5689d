"""Makes records for tests that need few of their fields."""

from typing import Any

from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus


def make_batch(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "id": "batch_1",
        "project_id": "p",
        "key_id": "k",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-1",
        "metadata": b"{}",
        "status": BatchStatus.IN_PROGRESS,
        "created_at": 1,
        "expires_at": 2,
    }
    return Batch(**fields | changes)
