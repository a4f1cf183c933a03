"""Middleware around every route: assigns a request id, measures time, and limits bodies that are not streamed."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.connections import is_over
from service.db.sessions import reader
from service.endpoints import ONLINE
from service.metrics.counters import HTTP
from service.metrics.tracing import UNTRACED, HttpSpan

MAX_BODY_BYTES = 64 * 1024
MAX_PARTS_BYTES = 512 * 1024  # for the list of an upload's parts
MAX_HEAD_BYTES, MAX_COOKIE_BYTES = 32 * 1024, 4 * 1024
log = structlog.get_logger()
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")  # any other method is counted as "other"
_COMPLETES = re.compile(r"/v1/uploads/[^/]*/complete")
_STREAMED = re.compile(r"/v1/files|/v1/uploads/[^/]*/parts|/dashboard/files")  # these enforce their own limits


_TOO_MANY = {
    "error": {
        "message": "This address has too many connections without an API key. Send a key, or try again.",
        "type": "server_error",
        "param": None,
        "code": "too_many_connections",
    }
}


class Edge:
    def __init__(self, app: ASGIApp, logs: bool, most_online: int) -> None:
        """Wrap `app`; `logs` turns on a log line for each request. `most_online`: bytes of an online request."""
        self._app = app
        self._logs = logs
        self._most_online = most_online

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if reason := _head_fault(scope["headers"]):
            await JSONResponse(
                {
                    "error": {
                        "message": reason,
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "headers_too_large",
                    }
                },
                431,
            )(scope, receive, send)
            return
        if is_over(scope) and not any(name in (b"authorization", b"cookie") for name, _ in scope["headers"]):
            await JSONResponse(_TOO_MANY, 503, {"retry-after": "1", "connection": "close"})(scope, receive, send)
            return
        reader.set(_who(scope))  # a request has a task of its own
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        method = scope["method"] if scope["method"] in METHODS else "other"
        sent, started, status, span = 0, perf_counter(), 500, HttpSpan(method, scope["path"], scope["headers"])

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent
            sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                added = ((b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff"))
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            bounded = receive if _STREAMED.fullmatch(scope["path"]) else _bounded(receive, self._most(scope["path"]))
            try:
                await self._app(scope, bounded, send_with_id)
            finally:
                route = getattr(scope.get("route"), "path", "other")
                took_s = perf_counter() - started
                HTTP.labels(method, route, str(status)).observe(took_s)
                if self._logs and scope["path"] not in UNTRACED:
                    about = {"method": method, "route": route, "status": status, "ms": round(1000 * took_s, 1)}
                    log.info("request", **about, bytes=sent, key=scope["state"].get("key", ""))
                span.end(route, status, request_id)

    def _most(self, path: str) -> int:
        """Return the most bytes of a body for this path."""
        if path in ONLINE:
            return self._most_online
        return MAX_PARTS_BYTES if _COMPLETES.fullmatch(path) else MAX_BODY_BYTES


def _who(scope: Scope) -> str:
    """Return a name of who calls, before the key is looked up, which is a read already."""
    given = dict(scope["headers"])
    client = scope.get("client") or ("",)
    said = given.get(b"authorization") or given.get(b"cookie") or str(client[0]).encode()
    return hashlib.blake2b(said, digest_size=16).hexdigest()


def _head_fault(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return why the headers are refused before they are parsed, or None if they are fine.

    Python before 3.11.10 can take hours to unquote a cookie.
    """
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        return f"The headers are larger than {MAX_HEAD_BYTES} bytes."
    cookies = [value for name, value in headers if name == b"cookie"]
    if sum(map(len, cookies)) > MAX_COOKIE_BYTES or any(b"\\" in value for value in cookies):
        return f"The cookies are larger than {MAX_COOKIE_BYTES} bytes or contain a backslash."
    return None


def _bounded(receive: Receive, most: int) -> Receive:
    """Wrap `receive` to raise HTTPException 413 when the body is larger than any that a route can use."""
    size = 0

    async def count() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, f"The body is larger than {most} bytes.")
        return message

    return count
