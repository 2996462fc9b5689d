"""When `batchline run` repeats a request (F4)."""

import pytest

from batchline.client.errors import (
    BrokenOff,
    ClientError,
    Denied,
    OutOfFunds,
    RequestRefused,
    ServerTrouble,
    Throttled,
    Unreachable,
)
from batchline.client.retry import Retrier


class Calls:
    """Raises each of these errors in turn, then returns."""

    def __init__(self, *faults: ClientError) -> None:
        self._faults = list(faults)
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        if self._faults:
            raise self._faults.pop(0)
        return "answer"


class Waits:
    def __init__(self, *, await_server: bool = False) -> None:
        self.seconds: list[float] = []
        self.reasons: list[str] = []
        self.retrier = Retrier(pause=self.seconds.append, on_retry=self.reasons.append, await_server=await_server)


def _refusal(kind: type[RequestRefused], retry_after: str | None = None) -> RequestRefused:
    return kind(429, "no", code=None, headers={"retry-after": retry_after} if retry_after else {})


def test_a_transient_error_is_retried_a_few_times() -> None:
    waits, calls = Waits(), Calls(BrokenOff("a"), _refusal(ServerTrouble), BrokenOff("b"))
    assert waits.retrier.few_times(calls) == "answer"
    assert waits.reasons == ["a", "no", "b"]
    assert waits.seconds == sorted(waits.seconds)

    waits, calls = Waits(), Calls(*(BrokenOff("a") for _ in range(50)))
    with pytest.raises(BrokenOff):
        waits.retrier.few_times(calls)
    assert 2 < calls.count < 10


@pytest.mark.parametrize(
    "fault", [Unreachable("refused"), _refusal(Denied), _refusal(OutOfFunds), _refusal(RequestRefused)]
)
def test_a_permanent_error_is_raised_at_once(fault: ClientError) -> None:
    """A10: insufficient_quota is never retried; an unreachable address is most likely a wrong one."""
    calls = Calls(fault)
    with pytest.raises(type(fault)):
        Waits().retrier.few_times(calls)
    assert calls.count == 1


def test_a_service_that_may_be_starting_is_waited_for() -> None:
    assert Waits(await_server=True).retrier.few_times(Calls(Unreachable("refused"))) == "answer"


def test_a_throttled_request_waits_as_long_and_as_often_as_the_server_asks() -> None:
    """A4: throttling uses up none of the few attempts."""
    waits = Waits()
    assert waits.retrier.few_times(Calls(*(_refusal(Throttled, "7") for _ in range(30)))) == "answer"
    assert waits.seconds == [7.0] * 30


def test_a_batch_on_the_server_is_waited_for_without_limit() -> None:
    """F4: the batch is durable there, so no outage ends the run; each wait stays bounded."""
    waits = Waits()
    assert waits.retrier.forever(Calls(*(Unreachable("refused") for _ in range(500)))) == "answer"
    assert len(waits.seconds) == 500
    assert max(waits.seconds) <= 15
    with pytest.raises(Denied):
        waits.retrier.forever(Calls(_refusal(Denied)))


def test_a_download_ends_after_a_few_failures_in_a_row() -> None:
    waits = Waits()
    fault = BrokenOff("cut")
    for failures in range(1, 5):
        waits.retrier.wait(fault, failures=failures)
    with pytest.raises(BrokenOff):
        waits.retrier.wait(fault, failures=5)
    assert len(waits.seconds) == 4
