"""Decides which addresses a webhook may reach (G10): those of the public Internet, unless the operator allows more.

A project chooses the URL of its webhook, so without these rules it could make the service call machines that only the
service can reach.
"""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_METADATA = IPv4Network("168.63.129.16/32")
"""The public address at which a cloud serves its metadata. The others are link-local or private."""
_SPECIAL = (_METADATA, IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
"""Addresses that are for protocols, and of which the standard library takes some for public ones."""


def refusal_of(address: str, *, tls: bool, allows_loopback: bool, allows_private: bool) -> str | None:
    """Return why a webhook may not connect to an address, or None if it may."""
    try:
        found = list(_meanings(ip_address(address.partition("%")[0])))
    except ValueError:
        return f"{address} is not an IP address"
    if any(meaning.is_unspecified or meaning.is_multicast for meaning in found):
        return f"{address} is not the address of one machine"
    if all(meaning.is_loopback for meaning in found):
        return None if allows_loopback else f"{address} is this machine"
    if not tls:
        return f"plain http is allowed only to this machine, and {address} is another one"
    if not allows_private and not all(_is_public(meaning) for meaning in found):
        return f"{address} is a private address (BATCHLINE_WEBHOOK_PRIVATE=on allows it)"
    return None


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        # A translator (NAT64) sends it on to the IPv4 address in it, which is one of the meanings and decides.
        return address in _NAT64
    return address.is_global and not address.is_reserved and not any(address in network for network in _SPECIAL)


def _meanings(address: Address) -> Iterator[Address]:
    """Yield the addresses that a connection may end at: an IPv6 address may contain an IPv4 one."""
    if isinstance(address, IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
