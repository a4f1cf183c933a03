"""Answers calls of the endpoints that SGLang's completion classes do not serve (`endpoints.py`)."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine_ext.plugin.worker import guard
from engine_ext.plugin.worker.answers import ABORTED, Answer, error_body, failed, refused
from engine_ext.plugin.worker.aside import LARGE, aside
from engine_ext.plugin.worker.endpoints import Served, is_long
from engine_ext.plugin.worker.marked import Told
from engine_ext.plugin.worker.refusals import code_and_param, in_short
from engine_ext.plugin.worker.text_size import text_size


@dataclass(frozen=True)
class OtherCalls:
    """Answers calls of the endpoints in `served`.

    `in_flight`: counts a request as in flight during its block, and aborts it if that raises.
    """

    served: Mapping[str, Served]
    vocab_size: int
    in_flight: Callable[[Told], AbstractContextManager[None]]

    async def run(self, endpoint: str, fields: dict[str, Any], known: Told) -> Answer:
        """Return the whole answer."""
        return await self._written(endpoint, fields, await self._ask(endpoint, fields, known), known)

    async def events(self, endpoint: str, fields: dict[str, Any], known: Told) -> AsyncGenerator[Answer | bytes, None]:
        """Yield the answer as a whole, or its server-sent events where the endpoint has such and they are asked for."""
        found, events = await self._ask(endpoint, fields, known), self.served[endpoint].events
        if events is None or not isinstance(found, AsyncIterator):
            yield await self._written(endpoint, fields, found, known)
            return
        has_begun = False
        try:
            with self.in_flight(known):
                async for event in events(found, known):
                    has_begun = True
                    yield event
        except Exception as error:
            if has_begun or (known.sent and known.fault is None):
                raise
            yield Answer(400, error_body(known.fault or f"SGLang cannot stream this: {type(error).__name__}", None))

    async def _ask(self, endpoint: str, fields: dict[str, Any], known: Told) -> Any:
        """Return what SGLang answers, or the Answer that refuses the request."""
        served = self.served[endpoint]
        try:
            request = served.request_type.model_validate(fields)
        except Exception as error:
            return refused(error, fields)
        try:
            is_large = text_size(endpoint, fields).total > LARGE
            with self.in_flight(known):
                fault = guard.fault(request, self.vocab_size) or await aside(partial(served.fault, request), is_large)
                if fault is not None:
                    return Answer(400, error_body(f"{fault[0]}: {fault[1]}", fault[0]))
                if known.aborted:
                    return ABORTED
                found = await served.ask(request, known)
                if known.cancelled:
                    raise asyncio.CancelledError
                return found
        except Exception as error:  # an error before SGLang has sent the request is the request's own fault
            if known.aborted:
                return ABORTED
            if known.sent:
                raise
            message = in_short(str(error), fields)
            code, param = code_and_param(message, fields)
            return Answer(400, error_body(message, param, code))

    async def _written(self, endpoint: str, fields: dict[str, Any], found: Any, known: Told) -> Answer:
        """Return what SGLang answered as a whole."""
        if isinstance(found, Answer):
            return found
        if known.aborted:  # SGLang answers it in many ways, even as if nothing had happened
            return ABORTED
        status = getattr(found, "status_code", 200)
        if status >= 400:
            return failed(status if known.sent else 400, bytes(found.body), fields)
        write = partial(self._json, endpoint, found, known)
        return Answer(200, await aside(write, is_long(found)), looped=known.looped)

    def _json(self, endpoint: str, found: Any, known: Told) -> bytes:
        body = self.served[endpoint].write(found, known)
        return body if isinstance(body, bytes) else json.dumps(body, allow_nan=False).encode()
