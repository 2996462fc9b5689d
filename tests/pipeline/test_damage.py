"""Damage is logged once for each place, and counted."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.pipeline.damage import DamageLog
from batchline.telemetry.metrics import Metrics
from tests.support.engine_harness import Bench


def test_each_damaged_place_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    damage_log = DamageLog(metrics)
    for _ in range(3):
        damage_log.report("shard", batch="batch_1", key="work/batch_1/1", offset=7)
    damage_log.report("shard", batch="batch_1", key="work/batch_1/1", offset=9)
    assert metrics.registry.get_sample_value("batchline_damage_total", {"what": "shard"}) == 2
    fields = [(vars(record)["batch"], vars(record)["object"], vars(record)["offset"]) for record in caplog.records]
    assert fields == [("batch_1", "work/batch_1/1", 7), ("batch_1", "work/batch_1/1", 9)]


def test_all_parts_of_a_process_have_one_log(tmp_path: Path) -> None:
    """A damaged segment that a client reads and then the finalizer is reported once."""
    with closing(Bench(tmp_path)) as bench:
        services: Any = bench.engine.api_role.services
        role: Any = bench.engine.worker_role
        finalizer = role._finalize_task._step.__self__
        parts = [services.results, services.download, services.merger, services.rerun, role.worker._claims]
        logs = [part._damage_log for part in [*parts, finalizer._repair, finalizer._assembler]]
        assert len(set(map(id, logs))) == 1
