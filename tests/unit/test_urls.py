"""Which URLs clients may make us call."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.urls import UrlGuard, plain_address

PUBLIC = "http://93.184.216.34:30000"


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        pytest.param(PUBLIC, True, id="public"),
        pytest.param("https://[2606:2800:220:1:248:1893:25c8:1946]/", True, id="public-v6"),
        pytest.param("http://127.0.0.1:1", False, id="loopback"),
        pytest.param("http://localhost:1", False, id="localhost"),
        pytest.param("http://10.1.2.3", False, id="private"),
        pytest.param("http://169.254.169.254/latest/meta-data", False, id="metadata"),
        pytest.param("http://100.100.100.200", False, id="shared"),
        pytest.param("http://0.0.0.0:1", False, id="unspecified"),
        pytest.param("http://2130706433:1", False, id="loopback-as-integer"),
        pytest.param("http://0x7f.1:1", False, id="loopback-as-hex"),
        pytest.param("http://[::1]:1", False, id="loopback-v6"),
        pytest.param("http://[::ffff:10.0.0.1]", False, id="mapped"),
        pytest.param("http://[64:ff9b::a00:1]", False, id="nat64"),
        pytest.param("http://[2002:a00:1::]", False, id="6to4"),
        pytest.param("http://[fd00::1]", False, id="unique-local"),
        pytest.param("http://[fe80::1%25eth0]", False, id="link-local"),
        pytest.param("http://224.0.0.1", False, id="multicast"),
        pytest.param("http://user:pw@93.184.216.34", False, id="user"),
        pytest.param("http://93.184.216.34:99999", False, id="port"),
        pytest.param("gopher://93.184.216.34", False, id="scheme"),
        pytest.param("http://", False, id="no-host"),
        pytest.param("http://no-such-host.invalid", False, id="unknown-name"),
    ],
)
async def test_addresses(url: str, fine: bool) -> None:
    assert (await UrlGuard().problem(url) is None) is fine


async def test_loopback_is_fine_for_a_gateway_on_loopback() -> None:
    guard = UrlGuard(loopback=True)
    assert await guard.problem("http://127.0.0.1:30000") is None
    assert await guard.problem("http://10.0.0.1:30000") is not None


@pytest.mark.parametrize(
    ("prefix", "url", "fine"),
    [
        pytest.param("http://10.0.0.5", "http://10.0.0.5:30000/x", True, id="any-port"),
        pytest.param("http://10.0.0.5:30000", "http://10.0.0.5:30000", True, id="that-port"),
        pytest.param("http://10.0.0.5:30000", "http://10.0.0.5:30001", False, id="another-port"),
        pytest.param("http://10.0.0.5", "http://10.0.0.50", False, id="longer-address"),
        pytest.param("http://10.0.0.5", "https://10.0.0.5", False, id="another-scheme"),
        pytest.param("http://10.0.0.5/a", "http://10.0.0.5/a/b", True, id="below"),
        pytest.param("http://10.0.0.5/a", "http://10.0.0.5/ab", False, id="longer-name"),
        pytest.param("http://10.0.0.5/a", "http://10.0.0.5/a/../b", False, id="dots"),
        pytest.param("http://10.0.0.5", "http://10.0.0.5@10.0.0.6", False, id="user-that-looks-like-it"),
        pytest.param("http://generator:30000", "http://generator:30000", True, id="name-that-is-not-resolved"),
    ],
)
async def test_allowed_prefixes(prefix: str, url: str, fine: bool) -> None:
    assert (await UrlGuard(allowed=[prefix]).problem(url) is None) is fine


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_what_counts(address: ipaddress.IPv4Address) -> None:
    for wrapped in (f"::ffff:{address}", str(ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) + int(address)))):
        assert plain_address(wrapped) == address
