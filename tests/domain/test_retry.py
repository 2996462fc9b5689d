"""How long a line waits before it is tried again: D3."""

from math import isfinite

import pytest

from batchline.domain.retry import RetryPolicy

POLICY = RetryPolicy(base_seconds=1.0)


def waits(policy: RetryPolicy, *, jitter: float, retry_after: float | None = None) -> list[float]:
    return [policy.wait(tries=tries, retry_after=retry_after, jitter=jitter) for tries in range(1, 9)]


@pytest.mark.rule("D3", "Exponential backoff.")
def test_the_longest_wait_doubles_up_to_a_minute() -> None:
    """D3: exponential backoff."""
    assert waits(POLICY, jitter=1.0) == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.rule("D3", "Full jitter.")
def test_the_jitter_is_full() -> None:
    """D3: anything between nothing and the longest wait."""
    assert waits(POLICY, jitter=0.0) == [0] * 8
    assert waits(POLICY, jitter=0.25)[:4] == [0.25, 0.5, 1, 2]


@pytest.mark.rule("D3", "Retry-After is honoured, up to 300 s.")
@pytest.mark.parametrize(("told", "obeyed"), [(0.0, 0.0), (7.5, 7.5), (300.0, 300.0), (301.0, 300.0), (1e9, 300.0)])
def test_retry_after_is_honoured(told: float, obeyed: float) -> None:
    """D3: never earlier, spread a little after it, and no longer than 300 s."""
    assert POLICY.wait(tries=1, retry_after=told, jitter=0.0) == obeyed
    assert POLICY.wait(tries=2, retry_after=told, jitter=1.0) == obeyed + 2


@pytest.mark.rule("D3", "At an upstream whose limit is known, the waits after refusals stay short.")
def test_at_a_known_limit_the_waits_double_late_and_seldom() -> None:
    """Fewer lines are started there, so the refused ones need not stay away longer and longer."""
    limited = [POLICY.wait(tries=tries, retry_after=None, jitter=1.0, limited=True) for tries in range(1, 13)]
    assert limited == [0.5] * 6 + [1, 2, 4] + [8] * 3
    assert POLICY.wait(tries=3, retry_after=7.0, jitter=0.5, limited=True) == 7.0625


def test_a_line_yields_when_a_third_of_its_throttles_is_spent() -> None:
    assert [POLICY.yield_seconds(throttles) for throttles in (1.0, 4.0, 4.5, 12.0)] == [0.0, 0.0, 300.0, 300.0]
    assert RetryPolicy(max_throttles=0).yield_seconds(0.5) == 300.0


def test_the_base_is_a_setting() -> None:
    """F2."""
    assert waits(RetryPolicy(base_seconds=0.0), jitter=1.0) == [0] * 8
    assert waits(RetryPolicy(base_seconds=20.0), jitter=1.0)[:3] == [20, 40, 60]


@pytest.mark.parametrize("tries", [1000, 1025, 100_000])
def test_no_number_of_tries_is_too_many(tries: int) -> None:
    """D3: the budgets are settings, and a large one must not end in an overflow."""
    assert isfinite(POLICY.wait(tries=tries, retry_after=None, jitter=1.0))


@pytest.mark.rule("D3", "4 attempts and 12 throttles by default.")
def test_the_defaults_are_the_contracts() -> None:
    """D3."""
    assert RetryPolicy() == RetryPolicy(max_attempts=4, max_throttles=12, base_seconds=1.0)
