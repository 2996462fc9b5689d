"""Limits the failed attempts to sign in to the console, and to read the metrics with the administrator's token."""

from collections import OrderedDict, deque
from contextlib import suppress
from ipaddress import IPv6Address

from starlette.requests import Request

from batchline.domain.errors import RateLimited
from batchline.ports import Clock

_MAX_FAILURES = 20
_FAILURE_SECONDS = 60.0
"""The failed attempts from one address after which another one gets 429. The administrator's token, which a
person chose, is not even compared then. A valid key signs in all the same: it has 192 random bits, everyone behind a
proxy has one address, and a stranger there must not keep the others out."""
_MAX_ALL_FAILURES = 500
"""The failed attempts from all addresses after which an address gets 429 after its first one. An address that has not
failed always has one, so that strangers elsewhere do not keep the administrator out."""
_MAX_ADDRESSES = 10_000
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
"""Headers that a proxy adds and a browser does not."""


class FailureLimit:
    """Counts failed attempts, by the network that they come from and all together."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._by_network: OrderedDict[str, deque[float]] = OrderedDict()
        """The last failures of each network, the one that failed last at the end."""
        self._all: deque[float] = deque(maxlen=_MAX_ALL_FAILURES)

    def check(self, network: str) -> None:
        """Raise RateLimited if attempts from a network have failed too often for another one."""
        since = self._clock.steady() - _FAILURE_SECONDS
        recent = [at for at in self._by_network.get(network, ()) if at > since]
        are_many = len(self._all) == _MAX_ALL_FAILURES and self._all[0] > since
        allowed = 1 if are_many else _MAX_FAILURES
        if len(recent) >= allowed:
            wait = int(recent[-allowed] - since) + 1
            raise RateLimited(
                f"Too many failed attempts. Try again in {wait} seconds.", retry_after=wait, bound="sign_in"
            )

    def count(self, network: str) -> None:
        """Count a failed attempt."""
        now = self._clock.steady()
        failures = self._by_network.setdefault(network, deque(maxlen=_MAX_FAILURES))
        self._by_network.move_to_end(network)
        failures.append(now)
        self._all.append(now)
        if len(self._by_network) > _MAX_ADDRESSES:
            self._by_network.popitem(last=False)


def network_of(request: Request) -> str:
    """Return the address that a request comes from. Of IPv6 it is the half in which one client has every address.

    A proxy is told from its own machine: whoever is on that can still sign in when strangers come through the proxy.
    """
    host = request.client.host if request.client else ""
    with suppress(ValueError):
        address = IPv6Address(host)
        host = host if address.ipv4_mapped else f"{int(address) >> 64:x}"
    return f"proxy at {host}" if is_relayed(request) else host


def is_relayed(request: Request) -> bool:
    """Return whether a proxy says that it sent a request."""
    return any(name in request.headers for name in _PROXY_HEADERS)
