"""/v1/chat/completions and /v1/completions for clients that wait: relayed to a worker, streamed or whole."""

import asyncio
from typing import Any

import msgspec
import structlog
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from service.api.caller import CalledOnline
from service.api.context import InContext
from service.api.relay import PREFIX_BYTES, STREAM, Relay
from service.endpoints import BY_PATH, ONLINE
from service.errors import ApiError, BadRequest, NotFound
from service.requests.body_limits import body_faults
from service.requests.lines import MAX_BRACKETS, MAX_NESTING, nesting, quoted

LARGE_BYTES = 64 * 1024  # a larger body is checked in a thread, so that streams go on
LOST = ApiError("The worker was lost while it answered. Send the request again.", code="worker_lost")
router = APIRouter(tags=["online"])
log = structlog.get_logger()


async def _answer(request: Request, context: InContext, _caller: CalledOnline) -> Response:
    """Answer at once, beside batches, on a worker of the model. Add `"stream": true` to get the tokens as they come."""
    path, raw = request.url.path, await request.body()
    check = (_checked, path, raw, context.settings.allow_patterns)
    body = await asyncio.to_thread(*check) if len(raw) > LARGE_BYTES else _checked(*check[1:])
    model: str = body["model"]
    await _check_model(context, model, path)
    prompt = body["messages"] if "messages" in body else body["prompt"]
    prefix = msgspec.json.encode(prompt)[:PREFIX_BYTES]
    return OnlineResponse(context.relay, path, model, prefix, raw, request.state.request_id)


class OnlineResponse(Response):
    """Relays one request while it is sent, and ends the request when the client hangs up.

    A client that does not read is cut off by `connections.py`.
    """

    def __init__(self, relay: Relay, path: str, model: str, prefix: bytes, raw: bytes, request_id: str) -> None:
        super().__init__()
        self._relay = relay
        self._about = (path, model, prefix, raw, request_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = asyncio.create_task(self._send(send)), asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _send(self, send: Send) -> None:
        async with self._relay.ask(*self._about) as relayed:
            kind = STREAM if relayed.streams else "application/json"
            headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": relayed.status, "headers": headers})
            try:
                async for piece in relayed.body:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except ConnectionError as error:
                log.warning("a worker was lost while it answered", error=str(error))
                event = b"data: " + msgspec.json.encode(LOST.body()) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body"})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _described(path: str) -> dict[str, Any]:
    """Return what openapi.yaml says of a path's body, which only the engine knows whole."""
    prompts = {
        "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]},
    }
    required = BY_PATH[path].required
    properties = {
        "model": {"type": "string"},
        "stream": {"type": "boolean", "description": "Whether to send the answer as server-sent events"},
        **{name: prompts[name] for name in required if name in prompts},
    }
    schema = {
        "type": "object",
        "description": "As in OpenAI's API; see docs/api.md",
        "required": list(required),
        "properties": properties,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_STREAMED = {200: {"content": {"application/json": {"schema": {}}, STREAM: {"schema": {"type": "string"}}}}}
for each in ONLINE:
    name = each.removeprefix("/v1/")
    router.add_api_route(
        each,
        _answer,
        methods=["POST"],
        name=name,
        summary=f"Create {name.replace('/', ' ')}",
        openapi_extra=_described(each),
        responses={**_STREAMED},
    )


def _checked(path: str, raw: bytes, allow_patterns: bool) -> dict[str, Any]:
    """Return the body of a request that may go to an engine. Raises BadRequest."""
    brackets, depth = nesting(raw)
    if depth > MAX_NESTING or brackets > MAX_BRACKETS:
        message = f"The body is nested more than {MAX_NESTING} levels deep, or has more than {MAX_BRACKETS} brackets."
        raise BadRequest(message, code="invalid_json")
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a JSON object: {error}.", code="invalid_json") from error
    for name in BY_PATH[path].required:
        if not body.get(name):
            raise BadRequest(f"{name!r} is missing or empty.", code="missing_required_parameter", param=name)
    if not isinstance(body["model"], str):
        raise BadRequest("'model' must be a string.", code="invalid_request", param="model")
    for param, reason in body_faults(body, allow_patterns):
        raise BadRequest(f"{param!r} {reason}.", code="invalid_request", param=param)
    return body


async def _check_model(context: InContext, model: str, path: str) -> None:
    served = None if "\0" in model else await context.endpoints.get(model)
    if served is None:
        raise NotFound(f"This service has no model {quoted(model)}.", code="model_not_found", param="model")
    if served and path not in served:
        message = f"The model {quoted(model)} does not support {path}."
        raise BadRequest(message, code="unsupported_endpoint", param="model")
