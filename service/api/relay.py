"""Sends an online request to a worker, and hands its answer back as it comes."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import structlog

from service.api.routing import Routes, Target
from service.db.tenant_tables import Tier
from service.errors import BadRequest, NotRetried, Unavailable
from service.queue.losses import LOSSES, Losses
from service.queue.trust import PROJECT, REQUEST_ID, TIER, WEIGHT

CONNECT_S = 2.0
TRIES = 4  # workers that are tried, the last ones only if those before did not even get the request
RUNS = 2  # workers that may run the request
BLOCKED_S = 30.0  # for which a client kept its stream waiting; beyond, the worker may have cut it for that
PREFIX_BYTES = 1024  # of a prompt, by which it is routed
STREAM = "text/event-stream"
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 25_000,  # milliseconds, for what was sent
}
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # nothing was sent
END = b"\n\n"  # of a server-sent event
NO_KEY = (
    "Online requests need BATCHWEAVE_SECRET_KEY, set to the same value for the API and all workers, and workers of the "
    "API's version."
)
log = structlog.get_logger()


class OnlineRequest(NamedTuple):
    """Holds a checked request: its path, model and class, how its prompt begins, its body as it came, and its id.

    `digest`: of the project, the path and the body.
    """

    path: str
    model: str
    tier: Tier
    prefix: bytes
    body: bytes
    digest: str
    id: str
    project: str
    weight: float


@dataclass(frozen=True, slots=True)
class Relayed:
    """Holds a worker's answer: its status, and its body in pieces as they come.

    `streams`: whether these are server-sent events. `held`: the bytes of it that are in memory. Reading the body raises
    ConnectionError if the worker is lost before its end.
    """

    status: int
    streams: bool
    held: int
    body: AsyncIterator[bytes]


class Relay:
    """Sends online requests to workers. Each process of the API has one."""

    def __init__(self, routes: Routes, losses: Losses, token: str | None) -> None:
        self._routes = routes
        self._losses = losses
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        await self._losses.close()
        if self._session is not None:
            await self._session.close()

    async def check(self, digest: str) -> None:
        """Raise BadRequest for a request with which workers were lost."""
        if await self._losses.refuses(digest):
            message = f"{LOSSES} workers were lost while they ran this request, so it is refused for ten minutes."
            raise BadRequest(message, code="request_kills_workers")

    @asynccontextmanager
    async def ask(self, request: OnlineRequest) -> AsyncGenerator[Relayed, None]:
        """Send a request to a worker of its model, and to another one if it fails before its answer begins.

        Leaving the block ends the request. Raises Unavailable if no worker answers.
        """
        if self._token is None:
            raise NotRetried(NO_KEY, code="online_not_configured")
        model = request.model
        failures: dict[Target, _NotAnswered] = {}
        while len(failures) < TRIES and sum(each.ran for each in failures.values()) < RUNS:
            targets = [each for each in await self._routes.targets(model, request.prefix) if each not in failures]
            if not targets:
                break
            target = targets[0]
            lost = partial(self._losses.lost, target.start, request.digest)
            with self._routes.sending(target):
                try:
                    with closing(await self._post(target, request)) as response:
                        if response.content_type == STREAM:
                            request = request._replace(body=b"")  # nobody gets it any more
                        yield await _relayed(response, lost)
                        return
                except asyncio.CancelledError:  # the client has left
                    self._losses.left(target.start, request.digest)
                    raise
                except _NotAnswered as error:
                    failures[target] = error
                    if error.ran:
                        lost()
        raise self._failure(model, failures)

    def _failure(self, model: str, failures: "dict[Target, _NotAnswered]") -> Unavailable:
        """Return what the client is told where none of the workers that were tried has answered."""
        if not failures and model in self._routes.without_proof:
            return NotRetried(NO_KEY, code="online_not_configured")
        if not failures:
            message = f"No worker of {model!r} takes online requests now. Try again later, or send them as a batch."
            return Unavailable(message, code="no_worker")
        reasons = {target.name: str(failure) for target, failure in failures.items()}
        if any(each.is_fault for each in failures.values()):  # a busy worker is none
            log.warning("no worker answered an online request", model=model, reasons=reasons)
        if sum(each.ran for each in failures.values()) >= RUNS:
            message = f"{RUNS} workers were lost while they ran this request, which may be the reason."
            return NotRetried(message, code="worker_lost")
        return Unavailable("All workers that could answer are busy or not responding. Try again.", code="overloaded")

    async def _post(self, target: Target, request: OnlineRequest) -> aiohttp.ClientResponse:
        """Return the worker's response. Raises _NotAnswered if there is none, or the worker takes no requests."""
        if self._session is None:
            # How many requests run is for the workers to say. Between two tokens there may be any time.
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/json",
            REQUEST_ID: request.id,
            TIER: request.tier,
            PROJECT: request.project,
            WEIGHT: f"{request.weight:.9f}",
        }
        try:
            response = await self._session.post(
                f"{target.url}{request.path}", data=request.body, headers=headers, allow_redirects=False
            )
        except CONNECTION_ERRORS as error:
            self._routes.avoid(target)
            raise _NotAnswered(repr(error), ran=not isinstance(error, UNREACHED)) from error
        if response.status in (401, 503) or response.content_type not in (STREAM, "application/json"):
            response.close()
            raise _NotAnswered(f"status {response.status}", ran=False, is_fault=response.status != 503)
        return response


class _NotAnswered(Exception):
    """A worker did not begin to answer, so another one may.

    `ran`: whether it may have begun to compute. `is_fault`: whether it was not just busy.
    """

    def __init__(self, message: str, ran: bool, is_fault: bool = True) -> None:
        super().__init__(message)
        self.ran, self.is_fault = ran, is_fault


def _socket(address: Any) -> socket.socket:
    """Return a socket that notices within half a minute that the other machine is gone."""
    made = socket.socket(*address[:3])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _relayed(response: aiohttp.ClientResponse, lost: Callable[[], None]) -> Relayed:
    """Return what to hand on: a stream as it comes, any other answer once it is whole. Raises _NotAnswered.

    `lost`: is called if the worker is lost while it streams.
    """
    if response.content_type == STREAM:
        return Relayed(response.status, True, 0, _pieces(response, lost))
    try:
        whole = await response.read()
    except CONNECTION_ERRORS as error:
        raise _NotAnswered(repr(error), ran=True) from error

    async def at_once() -> AsyncIterator[bytes]:
        yield whole

    return Relayed(response.status, False, len(whole), at_once())


async def _pieces(response: aiohttp.ClientResponse, lost: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield whole events only, so that what follows a lost one can be read. Raises ConnectionError."""
    rest, blocked_s = b"", 0.0
    try:
        async for piece in response.content.iter_any():
            whole, end, rest = (rest + piece).rpartition(END)
            if end:
                given_at = time.perf_counter()
                yield whole + end
                blocked_s += time.perf_counter() - given_at
    except CONNECTION_ERRORS as error:
        if blocked_s < BLOCKED_S:
            lost()
        raise ConnectionError(repr(error)) from error
    if rest:
        raise ConnectionError("the stream ended within an event")
