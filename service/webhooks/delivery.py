"""One delivery over HTTP, to public addresses only: a webhook must not be a way into the operator's own network."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

TIMEOUT_S = 10.0
GLOBAL_V6 = ipaddress.ip_network("2000::/3")
# Which Python 3.11 takes for public: documentation, and a way from IPv6 to IPv4 that was given up.
NOT_PUBLIC = (ipaddress.ip_network("3fff::/20"), ipaddress.ip_network("192.88.99.0/24"))
NOWHERE = "the host has no public address"
_lookups = ThreadPoolExecutor(max_workers=16, thread_name_prefix="lookup")


class Unreachable(Exception):
    """The URL cannot or may not be reached; the message may be shown to whoever set it."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where deliveries may go: with `private`, to any address and without TLS."""

    private: bool = False

    def check(self, url: str) -> None:
        """Raises Unreachable for what no delivery may go to, as far as the URL itself says."""
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise Unreachable("the URL is malformed") from error
        if parts.scheme != "https" and not (self.private and parts.scheme == "http"):
            raise Unreachable("the URL must begin with https://")
        if not parts.hostname or parts.username is not None or parts.password is not None:
            raise Unreachable("the URL must name a host, and no user")

    async def address(self, host: str, port: int) -> str:
        """The host's address that is connected to; asked once, so that a name cannot change its mind in between."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                addresses = await _look_up(host, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Unreachable(NOWHERE) from error
        # In the same words, or a tenant who sets a URL could ask which names of our network there are.
        if not addresses or (not self.private and not all(_is_public(address) for address in addresses)):
            raise Unreachable(NOWHERE)
        return addresses[0]


async def _look_up(host: str, port: int) -> list[str]:
    """By threads of their own: names that are slow must not hold up what else uses threads."""
    found = await asyncio.get_running_loop().run_in_executor(
        _lookups, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(each[4][0]) for each in found]


async def deliver(url: str, body: bytes, headers: dict[str, str], reach: Reach) -> int:
    """POST it, follow nothing and read nothing; the status. Raises Unreachable."""
    reach.check(url)
    parts = urlsplit(url)
    host = parts.hostname or ""
    address = await reach.address(host, parts.port or (443 if parts.scheme == "https" else 80))
    bracketed = f"[{address}]" if ":" in address else address
    target = parts._replace(netloc=bracketed if parts.port is None else f"{bracketed}:{parts.port}")
    name = parts.netloc
    try:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, follow_redirects=False) as client,
            client.stream(
                "POST",
                target.geturl(),
                content=body,
                headers={**headers, "host": name},
                extensions={"sni_hostname": host},
            ) as response,
        ):
            return response.status_code
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
        raise Unreachable(f"{type(error).__name__} at the connection") from error


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if inner is None and parsed not in GLOBAL_V6:  # ways to say an IPv4 address, and old private ranges
            return False
        parsed = inner or parsed
    if any(parsed in each for each in NOT_PUBLIC):
        return False
    return parsed.is_global and not parsed.is_multicast
