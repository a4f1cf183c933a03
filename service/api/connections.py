"""Closes idle connections: headers must arrive in ten seconds, a body must make progress, each address has a share.

A connection on which a known key has called, and one from this machine, has only that share. Of others an address has
few; on more of them, calls without a key get 503.

uvicorn waits without limit for a request's headers and body, so a few hundred idle sockets would use up all file
descriptors of the process.
"""

import asyncio
import resource
from collections import Counter, deque
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.pieces import PiecewiseProtocol
from service.settings import Settings, is_loopback

Client = tuple[str, int]  # address and port

PEER = "connection_of"
HEAD_S = 10.0  # from the start of a connection, or the last response on it, to the end of the next headers
BODY_S = 30.0  # in which an incomplete body must deliver BODY_BYTES or its rest
BODY_BYTES = 16 * 1024
# For which a connection stays open between two requests. A client that sends its next one while we close loses it, so
# this is longer than clients and proxies themselves keep an idle one: 5 s (httpx, openai), 15 s (aiohttp), 60 s.
KEPT_S = 75
READ_S = 60.0  # in which a client must read READ_BYTES or the rest of what waits for it
READ_BYTES = 64 * 1024
OVER = 4  # times its most without a known key an address may have, of which those above it are answered 503
SHARE = 4  # one address may have this fraction, 1 / SHARE, of the process's descriptors

_by_address: Counter[str] = Counter()  # all connections
_strange: Counter[str] = Counter()  # those on which no known key has called yet
_strangers: dict[Client, bool] = {}  # these, and whether their address had its most when they came


def raise_descriptors() -> None:
    """Raise the process's limit on file descriptors to the highest that the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_over(scope: Scope) -> bool:
    """Return whether a call's connection came when its address had the most that it may have without a known key."""
    return _strangers.get(scope.get("state", {}).get(PEER), False)


def know(scope: Scope) -> None:
    """Note that a known key calls on a connection, which no longer counts among those of strangers."""
    _forget(scope.get("state", {}).get(PEER))


def _forget(client: Client | None) -> None:
    if client is not None and _strangers.pop(client, None) is not None:
        _strange[client[0]] -= 1
        if not _strange[client[0]]:
            del _strange[client[0]]


def _named(app: ASGIApp, client: Client) -> ASGIApp:
    """Tell each call who is at the other end of its connection: a trusted proxy's headers replace `scope["client"]`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][PEER] = client
        await app(scope, receive, send)

    return call


class PatientProtocol(PiecewiseProtocol):
    """A protocol that does not wait indefinitely."""

    most: int = 0  # connections of one address without a known key; 0: any number
    share: int = 0  # all connections of one address
    _address: str | None = None
    _timer: asyncio.TimerHandle | None = None
    _reads: asyncio.TimerHandle | None = None
    _come: int = 0  # bytes since the timer for a body started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        is_limited = self.most > 0 and not is_loopback(address)
        is_full = self.most > 0 and _by_address[address] >= self.share
        if is_full or (is_limited and _strange[address] >= OVER * self.most):
            transport.abort()
            return
        _by_address[address] += 1
        self._address = address
        if is_limited and self.client is not None:
            _strangers[self.client] = _strange[address] >= self.most
            _strange[address] += 1
            self.app = _named(self.app, self.client)
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.resume_writing()
        if self._address is not None:
            _by_address[self._address] -= 1
            if not _by_address[self._address]:
                del _by_address[self._address]
            self._address = None
        _forget(self.client)
        super().connection_lost(exc)

    def take(self, data: bytes) -> None:
        was_head = self.conn.their_state is h11.IDLE
        was_between = was_head and self._timer is None
        was_answered = self.conn.our_state is h11.DONE
        super().take(data)
        state: Any = self.conn.their_state
        if was_answered:  # the rest of a body that nobody reads has BODY_S in all
            if state is not h11.SEND_BODY:
                self._expect(None)
        elif state is h11.SEND_BODY:
            self._come += len(data)
            if self._timer is None or was_head or self._come >= BODY_BYTES:
                self._expect(BODY_S)
        elif state is not h11.IDLE:
            self._expect(None)
        elif was_between:  # the next request's headers begin on a kept-alive connection
            self._expect(HEAD_S)

    def on_response_complete(self) -> None:
        # uvicorn itself closes a kept-alive connection that stays idle.
        self._expect(BODY_S if self.conn.their_state is h11.SEND_BODY else None)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start a timer when the client does not read its response, or we would hold that data indefinitely."""
        super().pause_writing()
        if self._reads is None:
            self._await_reads()

    def _await_reads(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._reads = self.loop.call_later(READ_S, self._look_at_reads, waiting)

    def _look_at_reads(self, waited: int) -> None:
        if self.transport.get_write_buffer_size() <= waited - READ_BYTES:
            self._await_reads()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reads is not None:
            self._reads.cancel()
            self._reads = None

    def _expect(self, seconds: float | None) -> None:
        """Close the connection after `seconds` unless called again before then; None stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._come = 0
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        # An unread body is not the sender's fault: the reader is held up, for example by slow object storage.
        cycle: Any = self.cycle  # None before the first request
        is_held = self.flow.read_paused or self.has_rest
        is_open = self.conn.our_state is not h11.DONE
        if cycle is not None and self.conn.their_state is h11.SEND_BODY and is_held and is_open:
            self._expect(BODY_S)
        else:
            self.transport.abort()


def served(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return how uvicorn serves `app`: by h11, which bounds a request's headers."""
    most = settings.connections_per_address
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits: dict[str, Any] = {"most": most, "share": soft // SHARE, "turns": deque()}
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        http=type("PatientProtocol", (PatientProtocol,), limits),
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=3,
    )
