"""Which addresses a webhook may reach (G10)."""

import pytest

from batchline.webhooks.addresses import refusal_of

PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::5db8:d822"]
PRIVATE = [
    "10.0.0.1",
    "172.16.5.4",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "::ffff:10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::a00:1",
    "64:ff9b::a83f:8110",
    "64:ff9b:1::5db8:d822",
    "2002:a9fe:a9fe::1",
    "192.0.2.1",
    "192.0.0.192",
    "192.88.99.1",
    "240.0.0.1",
    "fec0::1",
]
LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
NOWHERE = ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "no address", ""]


def is_allowed(address: str, *, tls: bool = True, loopback: bool = False, private: bool = False) -> bool:
    return refusal_of(address, tls=tls, allows_loopback=loopback, allows_private=private) is None


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed_over_tls(address: str) -> None:
    assert is_allowed(address)
    assert not is_allowed(address, tls=False)
    assert not is_allowed(address, tls=False, private=True)


@pytest.mark.rule("G10", "Private, link-local and metadata addresses are refused unless a setting allows them.")
@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_need_the_setting(address: str) -> None:
    assert not is_allowed(address)
    assert not is_allowed(address, loopback=True)
    assert is_allowed(address, private=True)
    assert not is_allowed(address, private=True, tls=False)


@pytest.mark.rule("G10", "This machine is allowed only for webhooks that the operator's command made.")
@pytest.mark.parametrize("address", LOOPBACK)
def test_this_machine_is_only_for_the_operator(address: str) -> None:
    assert not is_allowed(address)
    assert not is_allowed(address, private=True)
    assert is_allowed(address, loopback=True)
    assert is_allowed(address, loopback=True, tls=False)


@pytest.mark.parametrize("address", NOWHERE)
def test_what_is_no_address_of_one_machine_is_always_refused(address: str) -> None:
    assert not is_allowed(address, loopback=True, private=True)
    assert not is_allowed(address, loopback=True, private=True, tls=False)


@pytest.mark.parametrize("address", ["2002:7f00:1::1", "64:ff9b::7f00:1"])
def test_an_address_that_leads_back_to_this_machine_is_no_public_one(address: str) -> None:
    assert not is_allowed(address, loopback=True)
