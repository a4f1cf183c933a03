"""What every request passes before a route: an id, a clock, and a bound on its body unless the route reads a stream."""

import re
import secrets
from time import perf_counter
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics.counters import HTTP
from service.tracing import HttpSpan

MAX_BODY_BYTES = 1024 * 1024
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")  # anything else is a caller's invention
_STREAMED = re.compile(r"/v1/files|/v1/uploads/[^/]*/parts|/dashboard/files")  # these count for themselves


class Edge:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        method = scope["method"] if scope["method"] in METHODS else "other"
        started, status, span = perf_counter(), 500, HttpSpan(method, scope["path"], scope["headers"])

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            bounded = receive if _STREAMED.fullmatch(scope["path"]) else _bounded(receive)
            try:
                await self._app(scope, bounded, send_with_id)
            finally:
                route = getattr(scope.get("route"), "path", "other")
                HTTP.labels(method, route, str(status)).observe(perf_counter() - started)
                span.end(route, status, request_id)


def _bounded(receive: Receive) -> Receive:
    """Raises HTTPException 413 when the body is longer than any that a route can use."""
    size = 0

    async def count() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
        return message

    return count
