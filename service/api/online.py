"""/v1/chat/completions and the like for clients that wait: relayed to a worker, streamed or whole."""

import asyncio
import hashlib
import time
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.api.body_bytes import CountedBody
from service.api.caller import CalledOnline
from service.api.context import Context, InContext
from service.api.relay import PREFIX_BYTES, STREAM, OnlineRequest, Relay
from service.db.tenant_tables import Tier
from service.endpoints import BY_PATH, ONLINE, ModelName
from service.errors import ApiError, BadRequest, NotFound, Unavailable
from service.metrics.counters import ONLINE_FIRST_TOKEN, ONLINE_REQUESTS, ONLINE_TOKEN
from service.requests.body_limits import body_faults
from service.requests.lines import nesting_fault, quoted
from service.settings import Settings
from service.tenants.keys import Caller

LARGE_BYTES = 64 * 1024  # a larger body is checked in a thread, so that streams go on
LOST_CODE = "worker_lost"
LOST = ApiError("The worker was lost while it answered. Send the request again.", code=LOST_CODE).body()
TIER_TEXT = "The class of the request: that of the key, or a weaker one. The answer says which it was."
ERROR_EVENT = b'data: {"error"'
CLIENT_LEFT = 499  # as in nginx: for the metrics, since nobody reads it
TIERS = ("auto", "scale", *(each.value for each in Tier))  # the first two are the key's, as if none were asked for
PROMPTS = ("messages", "prompt", "input")
router = APIRouter(tags=["online"])
log = structlog.get_logger()


async def _answer(request: Request, context: InContext, caller: CalledOnline) -> Response:
    """Answer one request at once, while batches run."""
    counted = context.body_bytes.body(caller.project.id)
    try:
        online = await _read(request, context, caller, counted)
    except ClientDisconnect:
        counted.let_go()
        return Response(status_code=CLIENT_LEFT)
    except BaseException:
        counted.let_go()
        raise
    return OnlineResponse(context.relay, online, counted)


async def _read(request: Request, context: Context, caller: Caller, counted: CountedBody) -> OnlineRequest:
    """Read and check a request. Raises ApiError."""
    path, pieces = request.url.path, list[bytes]()
    async for piece in request.stream():  # `body` would keep it as long as the request
        counted.add(len(piece))
        pieces.append(piece)
    raw = b"".join(pieces)
    project = caller.project.id
    check = partial(_checked, project, path, raw, context.settings)
    asked = await asyncio.to_thread(check) if len(raw) > LARGE_BYTES else check()
    await _check_model(context, asked, path)
    await context.relay.check(asked.digest)
    tier = caller.tier(asked.tier)
    name = ModelName.of(asked.model).base
    return OnlineRequest(
        path, name, tier, asked.prefix, raw, asked.digest, request.state.request_id, project, caller.project.weight
    )


class Asked(NamedTuple):
    """Says what a body asks for: its model, its class, how the prompt begins, and a digest of all of it."""

    model: str
    tier: Tier | None
    prefix: bytes
    digest: str


class OnlineResponse(Response):
    """Relays one request while it is sent, and ends the request when the client hangs up.

    A client that does not read is cut off by `connections.py`.
    """

    def __init__(self, relay: Relay, asked: OnlineRequest, counted: CountedBody) -> None:
        super().__init__()
        self._relay = relay
        self._asked = asked
        self._counted = counted
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.wait({sending, leaving})
            self._counted.let_go()
        labels = (self._asked.model, self._asked.tier)
        if sending.cancelled():
            ONLINE_REQUESTS.labels(*labels, "client_left").inc()
            if not self._is_started:  # nobody reads it; it says in the metrics that the service did not fail
                await send({"type": "http.response.start", "status": CLIENT_LEFT, "headers": []})
            return
        error = sending.exception()
        outcome = error.code if isinstance(error, Unavailable) else "failed" if error else sending.result()
        ONLINE_REQUESTS.labels(*labels, outcome).inc()
        if error is not None:
            raise error

    async def _send(self, send: Send) -> str:
        """Send the answer as it comes, and return what came of the request."""
        began, endpoint = time.perf_counter(), BY_PATH[self._asked.path]
        async with self._relay.ask(self._asked) as relayed:
            kind = STREAM if relayed.streams else "application/json"
            headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            self._asked = self._asked._replace(body=b"")  # a stream may take long
            self._counted.let_go()
            self._counted.add(relayed.held)  # until the client has read it
            self._is_started = True
            await send({"type": "http.response.start", "status": relayed.status, "headers": headers})
            labels = (self._asked.model, self._asked.tier)
            first, tokens, mark = time.perf_counter(), 0, endpoint.token_mark
            if relayed.streams:
                ONLINE_FIRST_TOKEN.labels(*labels).observe(first - began)
            outcome = "answered" if relayed.status < 400 else "refused" if relayed.status < 500 else "failed"
            try:
                async for piece in relayed.body:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    tokens += piece.count(mark)
                    if ERROR_EVENT in piece:  # no text can contain it: JSON escapes quotes
                        outcome = LOST_CODE if LOST_CODE.encode() in piece else "failed"
                if relayed.streams and tokens > 1:
                    ONLINE_TOKEN.labels(*labels).observe((time.perf_counter() - first) / (tokens - 1))
            except ConnectionError as error:
                outcome = LOST_CODE
                log.warning("a worker was lost while it answered", error=str(error))
                await send({"type": "http.response.body", "body": endpoint.error_event(LOST), "more_body": True})
            await send({"type": "http.response.body"})
            return outcome


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _described(path: str) -> dict[str, Any]:
    """Return what openapi.yaml says of a path's body, which only the engine knows whole."""
    text_or_list = {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}
    messages = {"type": "array", "items": {"type": "object"}, "minItems": 1}
    prompts = {"messages": messages, "prompt": text_or_list, "input": text_or_list}
    required = BY_PATH[path].required
    properties: dict[str, Any] = {
        "model": {"type": "string"},
        **{name: prompts[name] for name in required if name in prompts},
    }
    if BY_PATH[path].streams:
        properties["stream"] = {"type": "boolean", "description": "Whether to send the answer as server-sent events"}
    if BY_PATH[path].generates:
        properties["service_tier"] = {"type": "string", "enum": list(TIERS), "description": TIER_TEXT}
    schema = {
        "type": "object",
        "description": "As in OpenAI's API; see docs/api.md",
        "required": list(required),
        "properties": properties,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _answers(path: str) -> dict[int | str, dict[str, Any]]:
    """Return what openapi.yaml says of a path's responses."""
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if BY_PATH[path].streams:
        content[STREAM] = {"schema": {"type": "string"}}
    return {200: {"content": content}, 503: {"description": "No worker answers: see docs/api.md"}}


for each in ONLINE:
    name = each.removeprefix("/v1/")
    router.add_api_route(
        each,
        _answer,
        methods=["POST"],
        name=name,
        summary=f"Create {name.replace('/', ' ')}",
        openapi_extra=_described(each),
        responses=_answers(each),
    )


def _checked(project: str, path: str, raw: bytes, settings: Settings) -> Asked:
    """Check the body of a project's request before it goes to an engine. Raises BadRequest."""
    if reason := nesting_fault(raw):
        raise BadRequest(f"The body {reason}.", code="invalid_json")
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a JSON object: {error}.", code="invalid_json") from error
    for name in BY_PATH[path].required:
        if not body.get(name):
            raise BadRequest(f"{name!r} is missing or empty.", code="missing_required_parameter", param=name)
    if not isinstance(body["model"], str):
        raise BadRequest("'model' must be a string.", code="invalid_request", param="model")
    if body.get("stream") and not BY_PATH[path].streams:
        raise BadRequest(f"{path} cannot stream yet: remove 'stream'.", code="streaming_unsupported", param="stream")
    tier = body.get("service_tier")
    if tier not in (None, *TIERS):
        message = f"'service_tier' must be one of {', '.join(TIERS)}."
        raise BadRequest(message, code="invalid_request", param="service_tier")
    for param, reason in body_faults(body, settings.allow_patterns):
        raise BadRequest(f"{param!r} {reason}.", code="invalid_request", param=param)
    space, name = "" if settings.shared_cache else project, ModelName.of(body["model"])
    prompt = next(body[each] for each in PROMPTS if each in BY_PATH[path].required)
    begins = prompt[:PREFIX_BYTES] if isinstance(prompt, str | list) else prompt  # a list may be of token ids
    return Asked(
        body["model"],
        Tier(tier) if tier in list(Tier) else None,
        msgspec.json.encode([space, name.adapter, begins])[:PREFIX_BYTES],
        hashlib.sha256(b"\0".join((project.encode(), path.encode(), raw))).hexdigest(),
    )


async def _check_model(context: InContext, asked: Asked, path: str) -> None:
    model = asked.model
    endpoints = None if "\0" in model else await context.endpoints.get(model)
    if endpoints is None:
        raise NotFound(f"This service has no model {quoted(model)}.", code="model_not_found", param="model")
    if endpoints and path not in endpoints:
        message = f"The model {quoted(model)} does not support {path}."
        raise BadRequest(message, code="unsupported_endpoint", param="model")
