"""Answers calls of the endpoints that SGLang's completion classes do not serve (`endpoints.py`)."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from engine_ext.plugin.worker import guard
from engine_ext.plugin.worker.answers import Answer, error_body, failed, refused
from engine_ext.plugin.worker.endpoints import Served
from engine_ext.plugin.worker.marked import Told


@dataclass(frozen=True)
class OtherCalls:
    """Answers calls of the endpoints in `served`.

    `in_flight`: counts a request as in flight, and aborts it unless its block comes to its end.
    """

    served: Mapping[str, Served]
    vocab_size: int
    in_flight: Callable[[Told], AbstractContextManager[None]]

    async def run(self, endpoint: str, fields: dict[str, Any], known: Told) -> Answer:
        """Return the whole answer."""
        return self._written(endpoint, await self._ask(endpoint, fields, known), known)

    async def events(self, endpoint: str, fields: dict[str, Any], known: Told) -> AsyncGenerator[Answer | bytes, None]:
        """Yield the answer as a whole, or its server-sent events where the endpoint has such and they are asked for."""
        found, events = await self._ask(endpoint, fields, known), self.served[endpoint].events
        if events is None or not isinstance(found, AsyncIterator):
            yield self._written(endpoint, found, known)
            return
        with self.in_flight(known):
            async for event in events(found, known):
                yield event

    async def _ask(self, endpoint: str, fields: dict[str, Any], known: Told) -> Any:
        """Return what SGLang answers, or the Answer that refuses the request."""
        served = self.served[endpoint]
        try:
            request = served.request_type.model_validate(fields)
        except Exception as error:
            return refused(error)
        try:
            fault = guard.fault(request, self.vocab_size) or served.fault(request)
            if fault is not None:
                return Answer(400, error_body(f"{fault[0]}: {fault[1]}", fault[0]))
            with self.in_flight(known):
                return await served.ask(request, known)
        except Exception as error:  # an error before SGLang has sent the request is the request's own fault
            if known.sent:
                raise
            return Answer(400, error_body(f"{type(error).__name__}: {error}", None))

    def _written(self, endpoint: str, found: Any, known: Told) -> Answer:
        """Return what SGLang answered as a whole."""
        if isinstance(found, Answer):
            return found
        if known.aborted:  # SGLang answers it in many ways, even as if nothing had happened
            return Answer(200, b"{}", aborted=True)
        status = getattr(found, "status_code", 200)
        if status >= 400:
            return failed(status if known.sent else 400, bytes(found.body))
        body = self.served[endpoint].write(found, known)
        return Answer(200, json.dumps(body, allow_nan=False).encode())
