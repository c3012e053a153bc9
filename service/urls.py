"""Which URLs a client may make us call: generators and reward services, never our own network's insides.

A URL that the operator listed (`ROLLWAY_ALLOWED_URLS`) is taken as it is. Any other must resolve to public addresses only; loopback is
fine while the gateway itself listens on loopback. A name may resolve differently later: networks that hold secrets also need a firewall.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

RESOLVE_S = 5.0
"""A resolver that takes longer is as good as down, and a client waits for us."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlGuard:
    """The rule for one gateway. `allowed`: URL prefixes; `loopback`: whether this gateway listens on loopback only."""

    allowed: Sequence[str] = ()
    loopback: bool = False

    async def problem(self, url: str) -> str | None:
        """What is wrong with `url` and the cure, or None."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            return "is not a URL; give http(s)://host:port"
        if parts.scheme not in ("http", "https") or not host:
            return "must be an http or https URL with a host"
        if parts.username is not None or parts.password is not None:
            return "must not hold a user or password; use headers or api_key"
        if any(_within(parts, urlsplit(prefix)) for prefix in self.allowed):
            return None
        try:
            addresses = await _resolve(host, port or 80)
        except (OSError, TimeoutError, UnicodeError):
            return f"the host {host!r} does not resolve here; check the name"
        if all(self._reachable(address) for address in addresses):
            return None
        return f"{host!r} is a private address; the operator can allow it with ROLLWAY_ALLOWED_URLS={parts.scheme}://{parts.netloc}"

    def _reachable(self, address: Address) -> bool:
        return (address.is_global and not address.is_multicast) or (self.loopback and address.is_loopback)


async def _resolve(host: str, port: int) -> list[Address]:
    async with asyncio.timeout(RESOLVE_S):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [plain_address(str(entry[4][0])) for entry in found]


def plain_address(text: str) -> Address:
    """The address that packets reach: IPv4 inside IPv6 (mapped, 6to4, NAT64) is what it wraps."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _within(url: SplitResult, prefix: SplitResult) -> bool:
    """Same scheme, host and port (unless the prefix names none), path below: never a comparison of text alone."""
    if (url.scheme, url.hostname) != (prefix.scheme, prefix.hostname):
        return False
    if prefix.port is not None and url.port != prefix.port:
        return False
    below = prefix.path.rstrip("/")
    return ".." not in url.path.split("/") and (url.path == below or url.path.startswith(f"{below}/") or not below)
