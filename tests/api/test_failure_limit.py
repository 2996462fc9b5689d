"""How often strangers may try a key."""

import pytest
from starlette.requests import Request

from batchline.api import failure_limit
from batchline.api.failure_limit import FailureLimit, network_of
from batchline.domain.errors import RateLimited
from tests.support.clocks import SettableClock


def _fail(limit: FailureLimit, network: str, times: int = 1) -> None:
    for _ in range(times):
        limit.check(network)
        limit.count(network)


@pytest.mark.rule("F7", "Failed attempts to sign in are limited.")
def test_an_address_that_fails_often_has_to_wait() -> None:
    clock = SettableClock()
    limit = FailureLimit(clock=clock)
    _fail(limit, "one", 20)
    with pytest.raises(RateLimited):
        limit.check("one")
    limit.check("another")
    clock.advance(61)
    limit.check("one")


@pytest.mark.rule("F7", "Many addresses together have few attempts, and one that has not failed always has one.")
def test_many_addresses_together_have_few_attempts() -> None:
    clock = SettableClock()
    limit = FailureLimit(clock=clock)
    for number in range(25):
        _fail(limit, f"address {number}", 20)
    _fail(limit, "new")
    with pytest.raises(RateLimited):
        limit.check("new")
    limit.check("one that has not failed")
    clock.advance(61)
    limit.check("new")


def test_failures_of_a_million_addresses_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_limit, "_MAX_ADDRESSES", 3)
    limit = FailureLimit(clock=SettableClock())
    for number in range(9):
        _fail(limit, str(number))
    assert list(limit._by_network) == ["6", "7", "8"]


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        (["192.0.2.1", "192.0.2.2"], 2),
        (["2001:db8:1:2::1", "2001:db8:1:2:ffff::1"], 1),
        (["2001:db8:1:2::1", "2001:db8:1:3::1"], 2),
        (["::ffff:192.0.2.1", "::ffff:192.0.2.2"], 2),
    ],
)
def test_the_addresses_of_one_client_count_together(hosts: list[str], count: int) -> None:
    """A client has as many addresses of IPv6 as it likes, which begin alike."""
    requests = [Request({"type": "http", "client": (host, 1), "headers": []}) for host in hosts]
    assert len({network_of(request) for request in requests}) == count


def test_a_stranger_behind_a_proxy_does_not_count_as_its_machine() -> None:
    """The administrator signs in there while strangers come through the proxy."""
    headers = [(b"x-forwarded-for", b"192.0.2.1")]
    relayed, direct = (Request({"type": "http", "client": ("127.0.0.1", 1), "headers": each}) for each in (headers, []))
    assert network_of(relayed) != network_of(direct)
