"""Answers online requests on a port of the worker's own, which only the service's API may use.

The paths are those of OpenAI's API. Clients never come here: the API knows their keys and limits (`api/online.py`).
"""

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Protocol, runtime_checkable

import msgspec
import structlog
from aiohttp import web, web_response

from service.db.tenant_tables import Tier
from service.endpoints import BY_PATH, ONLINE
from service.queue.trust import PROJECT, REQUEST_ID, TIER, WEIGHT
from service.requests.body_limits import choices
from service.worker.batch_engine import EngineAnswer

STALLED_S = 60.0  # for which the API may read nothing of a stream before the request is aborted
MOST = 1024  # online requests at once, and their choices; the API tries another worker, or tells the client to wait
MOST_OF_PROJECT = MOST * 7 // 8  # of these choices
MOST_FLEX = MOST // 2  # of these if they are flex, so that others find room
FAILED = "The engine failed on this request."
ENDED = "The worker is stopping, or must run other requests alone. Send the request again."
SILENT_S = 30.0  # for which a connection may say nothing between requests: longer than the API keeps an idle one
ENDS_S = 1.0  # for connections to close at a stop
# No versions of what is behind it, also where the head of a request is no head.
web_response.SERVER_SOFTWARE = "batchweave"  # pyright: ignore[reportPrivateImportUsage]
log = structlog.get_logger()
_ID = re.compile(r"req_[0-9a-f]{32}")


@runtime_checkable
class Events(Protocol):
    """Yields the server-sent events of one answer, from the first token on."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def close(self) -> None: ...


class OnlineEngine(Protocol):
    """The interface that the door needs of an engine; engine_ext.plugin.worker.host.EngineHost implements it."""

    def refusal(self, slo: str) -> str | None: ...
    async def serve(
        self, endpoint: str, body: dict[str, Any], rid: str, slo: str, size: int, project: str, weight: float
    ) -> EngineAnswer | Events: ...


class Door:
    """Serves one engine's online requests over HTTP.

    `against`: returns why the worker takes no online request now, or None.
    """

    def __init__(
        self,
        engine: OnlineEngine,
        models: Collection[str],
        token: str,
        most_bytes: int,
        against: Callable[[], str | None],
    ) -> None:
        self._engine = engine
        self._models = models
        self.token = token
        self._against = against
        self._requests: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()  # those of them that the worker ends, and not their clients
        self._choices = Counter[str]()  # of the requests that the engine has, by project
        app = web.Application(client_max_size=most_bytes)
        app.add_routes([web.post(path, self._serve) for path in ONLINE])
        # A handler is cancelled when its client hangs up, which aborts the request.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=ENDS_S,
            keepalive_timeout=SILENT_S,  # also for a head that is never whole
        )

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    async def open(self, host: str, port: int) -> str:
        """Listen, and return the URL by which the API reaches this worker."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        address = self._runner.addresses[0]
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{address[1]}"

    def end_all(self) -> None:
        """End the requests that are not answered: streams by an error event, others so that another worker has them."""
        for task in self._requests - self._ended:
            self._ended.add(task)
            task.cancel()

    async def close(self, within_s: float) -> None:
        """Wait for the answers that are under way, and then end those that are not finished."""
        if self._requests:
            await asyncio.wait(self._requests, timeout=within_s)
        self.end_all()
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self.token.encode()):
            return _refuse(401, "This port is for the service's own API.", "invalid_token")
        tier = request.headers.get(TIER, Tier.DEFAULT)
        most = MOST_FLEX if tier == Tier.FLEX else MOST
        reason = self._against() or ("it answers as many as it can" if self.in_flight >= most else None)
        if reason is not None:
            return _refuse(503, f"The worker takes no online request now: {reason}.", "overloaded")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await self._answer(request, tier)
        except asyncio.CancelledError:
            self._raise_if_client_left()
            return _refuse(503, ENDED, "overloaded")
        finally:
            self._requests.discard(task)
            self._ended.discard(task)

    async def _answer(self, request: web.Request, tier: str) -> web.StreamResponse:
        request_id = request.headers.get(REQUEST_ID, "")
        if not _ID.fullmatch(request_id):
            return _refuse(400, f"{REQUEST_ID} is not a request id.", "invalid_request")
        try:
            async with asyncio.timeout(STALLED_S):
                raw = await request.read()
        except TimeoutError:
            return _refuse(400, "The body did not come to its end.", "incomplete_body")
        if tier not in list(Tier):
            return _refuse(400, f"{TIER} is not a service tier.", "invalid_request")
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _refuse(400, f"The body is not valid: {error}.", "invalid_json")
        if body.get("model") not in self._models:  # the API's list of workers may be older than this one
            return _refuse(503, "The worker serves another model now.", "overloaded")
        if late := self._engine.refusal(tier):
            return _refuse(503, f"The worker would answer too late: {late}.", "overloaded")
        # Of an API of before, which names no project, each request is somebody else's.
        project, count = request.headers.get(PROJECT) or request_id, choices(body)
        mine, all_ = self._choices[project], self._choices.total()
        # A project's only request may have more, so that it runs at all.
        if all_ >= MOST or (mine and (mine + count > MOST_OF_PROJECT or all_ + count > MOST)):
            return _refuse(503, "The worker takes no online request now: it answers as many as it can.", "overloaded")
        self._choices[project] += count
        try:
            return await self._answer_body(request, body, (tier, len(raw), project, _weight(request)))
        finally:
            self._choices[project] -= count
            if not self._choices[project]:
                del self._choices[project]

    async def _answer_body(
        self, request: web.Request, body: dict[str, Any], about: tuple[str, int, str, float]
    ) -> web.StreamResponse:
        request_id = request.headers[REQUEST_ID]
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            # The answer's id is the request's, so that the logs of the API and the worker can be joined.
            rid = BY_PATH[request.path].id_prefix + request_id.removeprefix("req_")
            found = await self._ask(request.path, body, (rid, *about))
            return await self._stream(request, found) if isinstance(found, Events) else found

    async def _ask(
        self, path: str, body: dict[str, Any], about: tuple[str, str, int, str, float]
    ) -> web.Response | Events:
        """Return the engine's answer, or its events once the first has come."""
        try:
            found = await self._engine.serve(path, body, *about)
        except Exception as error:  # its text may quote the prompt
            log.error("the engine failed on an online request", error=type(error).__name__)
            return _refuse(500, FAILED, "engine_failed")
        if isinstance(found, Events):
            return found
        if found.aborted:
            return _refuse(500, FAILED, "engine_failed")
        return web.Response(body=found.body, status=found.status_code, content_type="application/json")

    def _raise_if_client_left(self) -> None:
        """Raise CancelledError unless the worker itself ended this request."""
        task = asyncio.current_task()
        if task is None or task not in self._ended:
            raise asyncio.CancelledError
        task.uncancel()

    async def _stream(self, request: web.Request, events: Events) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            async for event in _until_failure(request.path, events):
                async with asyncio.timeout(STALLED_S):
                    await response.write(event)
            await response.write_eof()
        except asyncio.CancelledError:
            self._raise_if_client_left()
            await _end(request, response)
        except TimeoutError:
            log.warning("online request aborted: nobody read its stream", seconds=STALLED_S)
            _cut(request)
        finally:
            await events.close()
        return response


def _weight(request: web.Request) -> float:
    """Return the project's weight; 1 if an API of before does not tell it."""
    given = request.headers.get(WEIGHT, "")
    return float(given) if re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", given) and float(given) > 0 else 1.0


async def _end(request: web.Request, response: web.StreamResponse) -> None:
    """End a stream with an error; cut it if nobody reads it."""
    try:
        async with asyncio.timeout(ENDS_S / 2):  # so that the connection still has time to close
            if not response.prepared:
                await response.prepare(request)
            await response.write(_event(request.path, ENDED, "worker_lost"))
            await response.write_eof()
    except TimeoutError:
        _cut(request)


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _until_failure(path: str, events: Events) -> AsyncIterator[bytes]:
    """Yield the events, and one that says so if the engine fails."""
    try:
        async for event in events:
            yield event
    except Exception as error:
        log.error("the engine failed on an online request", error=type(error).__name__)
        yield _event(path, FAILED, "engine_failed")


def _event(path: str, message: str, code: str) -> bytes:
    return BY_PATH[path].error_event(_error(message, "server_error", code))


def _error(message: str, kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refuse(status: int, message: str, code: str) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response(_error(message, kind, code), status=status)
