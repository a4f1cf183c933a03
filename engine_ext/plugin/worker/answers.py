"""Holds what an engine answers: a status and a JSON body, or a stream; errors are in OpenAI's envelope."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from engine_ext.plugin.worker.messages import fault_of
from engine_ext.plugin.worker.refusals import code_and_param, in_short, nearest

DATA = b"data: "
MOST_ERRORS = 1000  # of one body, that are looked at: each becomes an object


@dataclass(frozen=True, slots=True)
class Answer:
    """SGLang's answer to one request: an HTTP status and a JSON body, or that the request was aborted.

    `looped`: the engine ended it because it repeats itself.
    """

    status_code: int
    body: bytes
    aborted: bool = False
    looped: bool = False


ABORTED = Answer(200, b"{}", aborted=True)


class Stream:
    """Yields the server-sent events of one answer. Close it when nobody reads it any more."""

    def __init__(self, first: bytes, rest: AsyncGenerator[Any, None]) -> None:
        self._first, self._rest = first, rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for event in self._rest:
            yield event

    async def close(self) -> None:
        await self._rest.aclose()


def added_fields(slo: str | None, device: str | None) -> bytes:
    """Return what `with_fields` puts before an answer's own: its class, as OpenAI's service_tier, and the device."""
    found = {"service_tier": slo, "device": device}
    named = [f"{json.dumps(name)}:{json.dumps(value)}," for name, value in found.items() if value is not None]
    return f"{{{''.join(named)}".encode()


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Return a JSON object with these fields before its own."""
    return fields + body[1:] if body[:1] == b"{" else body


def event_with_fields(event: bytes, fields: bytes) -> bytes:
    """Return a server-sent event whose object, if it has one, has these fields before its own."""
    if not event.startswith(DATA) or event.startswith(b'data: {"error"'):
        return event
    return DATA + with_fields(event[len(DATA) :], fields)


def refused(error: Exception, fields: dict[str, Any]) -> Answer:
    """Say what is wrong with a body with these fields that SGLang's models refuse."""
    if isinstance(error, RecursionError):
        return Answer(400, error_body("The body is nested too deeply.", None))
    if fault := fault_of(fields):
        return Answer(400, error_body(f"{fault[0]} {fault[1]}.", fault[0]))
    if not isinstance(error, ValidationError):
        return Answer(400, error_body("A field has the wrong type.", None))
    if error.error_count() > MOST_ERRORS:
        return Answer(400, error_body("Too many values of the body have the wrong type to name them.", None))
    param, reason = nearest(error.errors(include_url=False, include_input=False), fields)
    return Answer(400, error_body(f"{param}: {reason}", param))


def failed(status_code: int, body: bytes, fields: dict[str, Any]) -> Answer:
    """Put SGLang's flat error object, for a request with these fields, into OpenAI's envelope."""
    found = json.loads(body)
    error = found.get("error", found)
    message = in_short(str(error["message"]), fields)
    code, param = code_and_param(message, fields) if status_code < 500 else ("server_error", None)
    return Answer(status_code, error_body(message, error.get("param") or param, code))


def error_body(message: str, param: str | None, code: str = "invalid_request") -> bytes:
    """Return an error in OpenAI's envelope."""
    kind = "server_error" if code == "server_error" else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()
