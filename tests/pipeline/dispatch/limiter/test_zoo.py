"""The limiter against upstreams of many kinds, in virtual time: how near it comes to a client that knows them.

``python -m tests.support.zoo`` prints the shares; `tests/support/zoo/cases.py` has the cases.
"""

import logging

import pytest

from tests.support.zoo.cases import CASES
from tests.support.zoo.table import print_table

SEED = 1
PROOF_SEEDS = range(1, 21)


@pytest.mark.rule("D9", "Whatever an upstream refuses, queues or announces, most of its capacity is used.")
@pytest.mark.parametrize("name", CASES)
def test_an_upstream_is_used_nearly_as_well_as_by_a_client_that_knows_it(name: str) -> None:
    """D3, D9: and no line fails that can succeed."""
    case = CASES[name]
    result = case.run(SEED)
    assert result.failed == 0
    if case.shortfall and result.share < case.goal:
        pytest.xfail(case.shortfall)
    assert result.share >= case.goal


@pytest.mark.proof
def test_upstreams_are_used_nearly_as_well_with_many_seeds(caplog: pytest.LogCaptureFixture) -> None:
    """As above; it prints a table."""
    caplog.set_level(logging.CRITICAL)
    print()
    assert print_table(CASES, seeds=PROOF_SEEDS)
