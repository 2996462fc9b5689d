"""When `batchline run` tries again (F4)."""

import pytest

from batchline.client.errors import (
    BrokenOff,
    ClientError,
    Denied,
    OutOfFunds,
    RequestRefused,
    Throttled,
    Trouble,
    Unreachable,
)
from batchline.client.retry import Retrying


class Calls:
    """Fails with each of these in turn, then answers."""

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
        self.retrying = Retrying(pause=self.seconds.append, waiting=self.reasons.append, await_server=await_server)


def _refusal(kind: type[RequestRefused], retry_after: str | None = None) -> RequestRefused:
    return kind(429, "no", code=None, headers={"retry-after": retry_after} if retry_after else {})


def test_what_may_pass_is_tried_a_few_times() -> None:
    waits, calls = Waits(), Calls(BrokenOff("a"), _refusal(Trouble), BrokenOff("b"))
    assert waits.retrying.soon(calls) == "answer"
    assert waits.reasons == ["a", "no", "b"]
    assert waits.seconds == sorted(waits.seconds)

    waits, calls = Waits(), Calls(*(BrokenOff("a") for _ in range(50)))
    with pytest.raises(BrokenOff):
        waits.retrying.soon(calls)
    assert 2 < calls.count < 10


@pytest.mark.parametrize(
    "fault", [Unreachable("nobody"), _refusal(Denied), _refusal(OutOfFunds), _refusal(RequestRefused)]
)
def test_what_will_not_pass_by_itself_is_told_at_once(fault: ClientError) -> None:
    """A10: insufficient_quota is never tried again; nobody at a server's address most likely is a wrong address."""
    calls = Calls(fault)
    with pytest.raises(type(fault)):
        Waits().retrying.soon(calls)
    assert calls.count == 1


def test_a_service_on_its_way_is_waited_for() -> None:
    assert Waits(await_server=True).retrying.soon(Calls(Unreachable("nobody"))) == "answer"


def test_a_throttled_request_waits_as_told_and_as_often_as_told() -> None:
    """A4: it spends none of the few tries."""
    waits = Waits()
    assert waits.retrying.soon(Calls(*(_refusal(Throttled, "7") for _ in range(30)))) == "answer"
    assert waits.seconds == [7.0] * 30


def test_a_job_that_is_on_the_server_is_waited_for_as_long_as_it_takes() -> None:
    """F4: it is durable there, so no outage is long enough to give it up; the waits stay bounded."""
    waits = Waits()
    assert waits.retrying.long(Calls(*(Unreachable("nobody") for _ in range(500)))) == "answer"
    assert len(waits.seconds) == 500
    assert max(waits.seconds) <= 15
    with pytest.raises(Denied):
        waits.retrying.long(Calls(_refusal(Denied)))


def test_a_few_tries_in_a_row_that_come_to_nothing_are_the_last() -> None:
    waits = Waits()
    fault = BrokenOff("cut")
    for tries in range(1, 5):
        waits.retrying.again(fault, tries=tries)
    with pytest.raises(BrokenOff):
        waits.retrying.again(fault, tries=5)
    assert len(waits.seconds) == 4
