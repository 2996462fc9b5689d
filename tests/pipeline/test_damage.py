"""Damage is logged once for each place, and counted."""

import pytest

from batchline.pipeline.damage import DamageLog
from batchline.telemetry.metrics import Metrics


def test_each_damaged_place_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    damage_log = DamageLog(metrics)
    for _ in range(3):
        damage_log.report("shard", batch="batch_1", key="work/batch_1/1", offset=7)
    damage_log.report("shard", batch="batch_1", key="work/batch_1/1", offset=9)
    assert metrics.registry.get_sample_value("batchline_damage_total", {"what": "shard"}) == 2
    fields = [(vars(record)["batch"], vars(record)["object"], vars(record)["offset"]) for record in caplog.records]
    assert fields == [("batch_1", "work/batch_1/1", 7), ("batch_1", "work/batch_1/1", 9)]
