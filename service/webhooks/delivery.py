"""Delivers webhooks over HTTP to public addresses only: they must not be a way into the operator's own network."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore

from service.webhooks.bounded import BoundedNetwork

TIMEOUT_S = 10.0
GLOBAL_V6 = ipaddress.ip_network("2000::/3")
# Networks that Python 3.11 wrongly counts as public: documentation, the deprecated 6to4 relays, and what providers use
# for their own services, such as 192.0.0.192 for an instance's metadata.
NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("3fff::/20", "192.88.99.0/24", "192.0.0.0/24")))
# OSError: what TLS finds after its handshake comes as it is.
FAILURES = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError)
NOWHERE = "the host has no public address"
_lookups = ThreadPoolExecutor(max_workers=16, thread_name_prefix="lookup")


class Unreachable(Exception):
    """The URL cannot or may not be reached; the message is safe to show to the webhook's owner."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Decides where deliveries may go; `private` allows any address, and HTTP without TLS."""

    private: bool = False

    def check(self, url: str) -> None:
        """Raise Unreachable for a URL that no delivery may go to, as far as the URL itself shows it."""
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise Unreachable("the URL is malformed") from error
        if parts.scheme != "https" and not (self.private and parts.scheme == "http"):
            raise Unreachable("the URL must begin with https://")
        if not parts.hostname or parts.username is not None or parts.password is not None:
            raise Unreachable("the URL must name a host, and no user or password")
        if not (self.private or _may_be_public(parts.hostname)):
            raise Unreachable(NOWHERE)

    async def address(self, host: str, port: int) -> str:
        """Return the address to connect to; it is resolved once, so that DNS cannot change it between check and use."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                addresses = await _look_up(host, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Unreachable(NOWHERE) from error
        # The message is the same in both cases, or a tenant could probe which names exist in our network.
        if not addresses or (not self.private and not all(_is_public(address) for address in addresses)):
            raise Unreachable(NOWHERE)
        return addresses[0]


async def _look_up(host: str, port: int) -> list[str]:
    """Resolve a host in a thread pool of its own: slow names must not block other uses of threads."""
    found = await asyncio.get_running_loop().run_in_executor(
        _lookups, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(each[4][0]) for each in found]


async def deliver(url: str, body: bytes, headers: dict[str, str], reach: Reach) -> int:
    """POST the body and return the status; follow no redirect and read no response body. Raises Unreachable."""
    reach.check(url)
    parts = urlsplit(url)
    host = parts.hostname or ""
    address = await reach.address(host, parts.port or (443 if parts.scheme == "https" else 80))
    bracketed = f"[{address}]" if ":" in address else address
    target = parts._replace(netloc=bracketed if parts.port is None else f"{bracketed}:{parts.port}")
    about = {"sni_hostname": host, "timeout": dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)}
    try:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            httpcore.AsyncConnectionPool(network_backend=BoundedNetwork()) as pool,
            pool.stream(
                "POST", target.geturl(), headers={**headers, "host": parts.netloc}, content=body, extensions=about
            ) as response,
        ):
            return response.status
    except (*FAILURES, TimeoutError, ValueError) as error:
        raise Unreachable(f"the request failed with {type(error).__name__}") from error


def _may_be_public(host: str) -> bool:
    """Return whether a host is a public address, or a name, which is looked up at each delivery."""
    with suppress(OSError):  # as the C library reads addresses: 0, 127.1, 2130706433
        return _is_public(socket.inet_ntoa(socket.inet_aton(host)))
    try:
        return _is_public(host)
    except ValueError:
        return host.rstrip(".").rpartition(".")[2] != "localhost"


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if inner is None and parsed not in GLOBAL_V6:  # other spellings of IPv4 addresses, and old private ranges
            return False
        parsed = inner or parsed
    if any(parsed in each for each in NOT_PUBLIC):
        return False
    return parsed.is_global and not parsed.is_multicast
