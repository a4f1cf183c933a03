# ruff: noqa: ASYNC109 - the time-outs are of httpcore's interface
"""Bounds what a webhook's receiver may send until its response has begun: interim responses may come without an end."""

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, cast

import httpcore

AT_ONCE = 4096  # bytes that are read before others have their turn
MOST = 65536


class BoundedNetwork(httpcore.AsyncNetworkBackend):
    """Opens connections of which no more than MOST bytes are read."""

    def __init__(self) -> None:
        self._network: httpcore.AsyncNetworkBackend = cast(Any, httpcore.AnyIOBackend)()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Bounded(await self._network.connect_tcp(host, port, timeout, local_address, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


class _Bounded(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream, self._left = stream, MOST

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._left <= 0:
            raise httpcore.RemoteProtocolError("the response does not begin")
        found = await self._stream.read(min(max_bytes, AT_ONCE), timeout)
        self._left -= len(found)
        await asyncio.sleep(0)
        return found

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Bounded(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
