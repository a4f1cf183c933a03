"""The HTTP application: its routes, and error handlers that answer in OpenAI's envelope."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from obstore.exceptions import BaseError
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from service.api import batches, content, files, health, metrics, models, online, reference, uploads, webhooks, workers
from service.api.bodies import explain
from service.api.body_bytes import BodyBytes
from service.api.caller import find_caller
from service.api.context import Context
from service.api.edge import Edge
from service.api.relay import Relay
from service.api.remembered import Remembered
from service.api.routing import Routes
from service.dashboard import add_dashboard, error_page, is_page, wrong_form
from service.db.clock import SYNC_S, SharedClock
from service.db.models import endpoints_of
from service.db.sessions import Database
from service.endpoints import ONLINE
from service.errors import ApiError, BadRequest, MethodNotAllowed, NotFound, PayloadTooLarge, Unavailable
from service.estimates.serving import ServingCache
from service.metrics.history import History
from service.objects.early_results import EarlyResults
from service.objects.storage import Storage
from service.queue.bell import Bell
from service.queue.connection import open_redis
from service.queue.losses import Losses
from service.queue.progress import Heartbeat, Progress
from service.queue.trust import deployment_token
from service.settings import Settings
from service.webhooks.secrets import Seal, sealing_key

# Redis only adds detail to what the API shows, so a hanging Redis must not hold up a page.
LOOK_S, LOOK_AGAIN_S = 1.0, 5.0
LOOK_POLLS = 8  # maximum age of its view of the other batches, in the service's polls
MEANT = (*ONLINE, "/v1/files", "/v1/batches", "/v1/uploads", "/v1/models")  # what clients ask for below another base
log = structlog.get_logger()


def create_app(settings: Settings, clock: Callable[[], float] | None = None) -> FastAPI:
    """Build the application from the parts that the settings name; they open when it starts.

    `clock` returns Unix seconds; the default is the database's clock.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        database = Database(settings.database, settings.database_timeout_s, connections=settings.database_connections)
        redis = open_redis(settings.redis, LOOK_S)
        storage = Storage.open(settings.storage)
        shared = SharedClock(database)
        now = clock or shared
        keeping = asyncio.create_task(_keep_time(shared))
        early = EarlyResults(database, storage, now)
        progress = Progress(redis, LOOK_AGAIN_S)
        serving_cache = ServingCache(database, Heartbeat(redis), History(redis), LOOK_POLLS * settings.poll_s)
        bell = Bell(redis, settings.poll_s)
        seal = Seal(sealing_key(settings))
        token = deployment_token(settings)
        relay = Relay(Routes(Heartbeat(redis), token), Losses(redis), token)
        callers = Remembered(partial(find_caller, database, now))
        endpoints = Remembered(partial(endpoints_of, database))
        parts = (database, storage, redis, settings, now, early, progress, serving_cache, bell, seal)
        app.state.context = Context(*parts, relay, BodyBytes(), callers, endpoints)
        yield
        await relay.close()
        keeping.cancel()
        await asyncio.wait([keeping])
        await redis.aclose()
        await database.close()

    app = FastAPI(
        title="batchweave",
        version=version("batchweave-server"),
        summary="Batch and online inference on SGLang behind OpenAI's API",
        lifespan=lifespan,
        docs_url=None,  # both would load scripts from another host
        redoc_url=None,
    )
    for module in (reference, files, content, uploads, batches, online, models, webhooks, workers, health, metrics):
        app.include_router(module.router)
    add_dashboard(app)
    app.add_middleware(Edge, logs=settings.access_log, most_online=settings.max_line_bytes)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(DBAPIError, _database_error)
    app.add_exception_handler(TimeoutError, _silent_database)
    app.add_exception_handler(PoolTimeout, _silent_database)
    app.add_exception_handler(OSError, _storage_error)
    app.add_exception_handler(BaseError, _storage_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


async def _keep_time(clock: SharedClock) -> None:
    while True:
        try:
            await clock.sync()
        except Exception as error:  # the database may be down; the clock keeps its last offset
            log.warning("the database's clock was not read", error=repr(error))
        await asyncio.sleep(SYNC_S)


def _answer(request: Request, error: ApiError) -> Response:
    """Return the error as a page to dashboard users, and in OpenAI's envelope to API clients."""
    if is_page(request):
        return error_page(request, error)
    return JSONResponse(error.body(), status_code=error.status_code, headers=error.headers)


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


def _validation_error(request: Request, error: Exception) -> Response:
    """Answer a body or query that does not match its schema with 400 and the field's name, as OpenAI does."""
    assert isinstance(error, RequestValidationError)
    if is_page(request):
        return wrong_form(request, error)
    first = error.errors()[0]
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        message = "Send the body as JSON, with the header Content-Type: application/json."
        return _answer(request, BadRequest(message, code="invalid_json"))
    if first["type"] == "json_invalid":
        return _answer(request, BadRequest("The body is not valid JSON.", code="invalid_json"))
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["loc"][0] == "path":
        return _answer(request, NotFound("The id in the path is not valid.", param=param))
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_request"
    return _answer(request, BadRequest(f"{param or 'body'}: {explain(first)}", code=code, param=param))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path
        message = f"No such path: {request.method} {path}"
        meant = next((each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in MEANT), None)
        message += f". Did you mean {meant}?" if meant else ""
        return _answer(request, NotFound(message, code="unknown_url"))
    if error.status_code == 405:
        message = f"The method {request.method} is not allowed on this path."
        return _answer(request, MethodNotAllowed(message, code="method_not_allowed"))
    if error.status_code == 413:
        return _answer(request, PayloadTooLarge(str(error.detail), code="body_too_large"))
    return _answer(request, BadRequest(str(error.detail)))


def _database_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DBAPIError)
    if isinstance(error, DataError):
        return _answer(
            request, BadRequest("A value in the request cannot be stored or looked up.", code="invalid_request")
        )
    is_new = error.statement is None  # what a server says to a new connection, for example that it starts
    if not (error.connection_invalidated or is_new or isinstance(error, OperationalError | InterfaceError)):
        return _unexpected_error(request, error)
    log.error("database failed", path=request.url.path, error=repr(error))
    return _answer(request, Unavailable("The database is not responding. Try again.", code="database_unavailable"))


def _silent_database(request: Request, error: Exception) -> Response:
    """Answer 503 when the database does not reply in time, or no connection becomes free in time."""
    log.error("database is not responding", path=request.url.path, error=repr(error))
    return _answer(request, Unavailable("The database is not responding. Try again.", code="database_unavailable"))


def _storage_error(request: Request, error: Exception) -> Response:
    """Answer 503 when object storage is full, slow or down, and 404 when an object is missing for good."""
    if isinstance(error, ConnectionError):  # raised by the database's driver before it has a connection
        return _silent_database(request, error)
    log.error("storage failed", path=request.url.path, error=repr(error))
    if isinstance(error, FileNotFoundError):
        return _answer(request, NotFound("The content is no longer in object storage.", code="content_not_found"))
    return _answer(request, Unavailable("Object storage is unavailable. Try again.", code="storage_unavailable"))


def _unexpected_error(request: Request, error: Exception) -> Response:
    log.error("request failed", path=request.url.path, request_id=request.state.request_id, exc_info=error)
    answer = _answer(request, ApiError("The service failed on this request; see its log.", code="internal_error"))
    answer.headers["x-request-id"] = request.state.request_id  # Edge sets it only on responses that pass through it
    return answer
