"""Streams a response of /v1/responses, from the events that SGLang makes of it.

SGLang's own say nothing of a length limit, and begin before the engine has accepted the request.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from engine_ext.plugin.worker.answers import DATA, Answer, error_body
from engine_ext.plugin.worker.marked import Told, told

BEGINS = ("response.created", "response.in_progress")  # sent before the engine has the request
ENDS = "response.completed"
FAILS = "response.failed"


async def response_events(
    found: AsyncIterator[str], known: Told, write: Callable[[dict[str, Any]], dict[str, Any]]
) -> AsyncGenerator[Answer | bytes, None]:
    """Yield the events of a response, the first one with its first token; or the Answer that refuses the request.

    `write`: completes the response object that some events hold. Raises RuntimeError if the engine failed.
    """
    first_events = b""
    async for event in _in_context(found, known):
        kind, body = _read(event)
        if kind == FAILS or known.aborted:
            if known.fault is None or not first_events:  # too late to refuse it
                raise RuntimeError("SGLang failed on a response")
            yield Answer(400, error_body(known.fault, None))
            return
        if body is None:
            written = event.encode()
        else:
            body["response"] = write(body["response"])
            if kind == ENDS and known.stopped_by_length:
                kind = body["type"] = "response.incomplete"
            written = b"event: %s\n%s%s\n\n" % (kind.encode(), DATA, json.dumps(body, allow_nan=False).encode())
        if kind in BEGINS:
            first_events += written
        else:
            yield first_events + written
            first_events = b""


async def _in_context(found: AsyncIterator[str], known: Told) -> AsyncIterator[str]:
    """Yield SGLang's events; it sends the request, which `told` describes, when the first one is asked for."""
    while True:
        before = told.set(known)
        try:
            event = await anext(found, None)
        finally:
            told.reset(before)
        if event is None:
            return
        yield event


def _read(event: str) -> tuple[str, dict[str, Any] | None]:
    """Return an event's type, and its object if that holds the response."""
    head, _, data = event.partition("\n")
    kind = head.removeprefix("event: ")
    if kind not in (*BEGINS, ENDS):
        return kind, None
    return kind, json.loads(data.removeprefix("data: "))
