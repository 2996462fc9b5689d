"""Batches whose work file is missing or cut off."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchline.domain.records import Batch
from tests.support.engine_harness import Bench


def work_file(bench: Bench, batch_id: str) -> Path:
    return bench.folder / "objects" / "work" / batch_id / "1"


async def batch_with_damaged_work_file(
    bench: Bench, damage: Callable[[Path], object], *, lines: int, models: Sequence[str] = ("m",)
) -> Batch:
    """Create a batch whose work file is damaged between its creation and its first claim. Its lines name all models."""

    async def strike(batch_id: str, **_: Any) -> None:
        damage(work_file(bench, batch_id))

    bench.store.trouble["start_batch"] = strike
    try:
        return await bench.batch_of(
            {"model": models[n % len(models)], "messages": [{"role": "user", "content": f"damaged {n}"}]}
            for n in range(lines)
        )
    finally:
        del bench.store.trouble["start_batch"]
