"""The limiter against upstreams of many kinds, in virtual time: how near it comes to a client that knows them.

``python -m tests.support.zoo`` prints the shares; `tests/support/zoo/cases.py` has the cases.
"""

import logging

import pytest

from tests.support.zoo.cases import CASES
from tests.support.zoo.table import print_table

SEED = 1
PROOF_SEEDS = range(1, 21)
PROOF_ONLY = {
    "hard 200": "hard 8",
    "hard 64, slow": "hard 40, very slow",
    "hard 32, Retry-After": "hard 4, long Retry-After",
    "growing 16 to 160": "hard, halving",
    "hard 64, half taken": "hard, halving",
    "replicas, hard 4 and 64": "8 replicas, hard 8",
    "hard 16, cools down for 5 s": "hard 8",
    "503 above 100 a second": "503 above 16",
    "a fourth 502 after 1 s": "a fourth 502 at once",
    "a fourth 503 after 5 s": "a fourth 502 at once",
    "529 above 8, slow": "503 above 16",
    "500 above 64": "503 above 16",
    "connections above 64 reset": "connections above 8 refused",
    "queue 8, then refused": "queue 20, then 503",
    "queue 256": "queue 64, heavy tail",
    "short and long answers": "two models, two queues",
    "queue, ten times as slow": "queue, halving",
    "queue, daily curve": "queue, halving",
    "overloading 12, slow": "overloading 32",
    "evenly 20, slow answers": "evenly 100",
    "evenly 20, then 60": "evenly 100",
    "bucket 10, slow answers": "bucket 5",
    "bucket 500": "bucket 5",
    "window, Retry-After": "window of a second, Retry-After",
    "slow sliding window, silent": "sliding window, silent",
    "tokens, bucket": "tokens, small bucket",
    "tokens, uneven lines": "tokens, small bucket",
    "two models": "two models, two queues",
    "beside a slow model": "beside a very slow model",
    "beside a very slow model of others": "beside a very slow model",
    "beside a slow model with one slot": "beside a very slow model",
    "two names, overloading 32": "two names, one queue",
    "a tenth always 503": "a tenth always refused",
    "most always refused": "a tenth always refused",
    "refused project, Retry-After": "refused project",
    "random 429, queue 32": "random 429",
    "a fifth by chance, queue 32": "random 429",
    "random 429, Retry-After": "random 429",
    "random 503": "random 429",
    "outage of 429, bucket": "outage of 429",
    "outage of 503": "outage of 429",
    "outage of 429, Retry-After": "outage of 429",
    "engine 16": "engine 64",
    "engine 384": "engine 64",
    "engine 16, uneven pace": "engine 16, uneven pace, queue length",
    "queue length of a busy engine": "queue length of an idle engine",
}
"""Cases that only the proof runs, because they take long, each with a case of its kind that runs always."""


@pytest.mark.rule("D9", "Whatever an upstream refuses, queues or announces, most of its capacity is used.")
@pytest.mark.parametrize("name", [name for name in CASES if name not in PROOF_ONLY])
def test_an_upstream_is_used_nearly_as_well_as_by_a_client_that_knows_it(name: str) -> None:
    """D3, D9: and no line fails that can succeed."""
    case = CASES[name]
    result = case.run(SEED)
    assert result.failed == 0
    assert result.share >= case.goal


def test_a_case_of_each_kind_runs_always() -> None:
    assert PROOF_ONLY.keys() <= CASES.keys()
    assert set(PROOF_ONLY.values()) <= CASES.keys() - PROOF_ONLY.keys()


@pytest.mark.proof
def test_upstreams_are_used_nearly_as_well_with_many_seeds(caplog: pytest.LogCaptureFixture) -> None:
    """As above; it prints a table."""
    caplog.set_level(logging.CRITICAL)
    print()
    assert print_table(CASES, seeds=PROOF_SEEDS)
