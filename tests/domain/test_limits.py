"""The size of shards, and when a shard runs alone."""

import pytest

from batchline.domain.limits import STRIKES, ShardLimits, runs_alone


@pytest.mark.parametrize(("total", "lines"), [(1, 8), (511, 8), (1024, 16), (16_384, 256), (50_000, 256)])
def test_small_batches_have_small_shards(total: int, lines: int) -> None:
    assert ShardLimits().lines_for(total) == lines


def test_a_shard_runs_alone_before_its_last_chance_and_not_after_one_death() -> None:
    assert [runs_alone(strikes) for strikes in range(STRIKES)] == [False, False, True]
