"""Identifies the caller: every /v1 route depends on it, and sees only what the caller's project owns."""

from collections.abc import Callable
from typing import Annotated

import structlog
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.connections import know
from service.api.context import Context, InContext
from service.db.sessions import Database, reader
from service.db.tenant_tables import Role
from service.errors import Forbidden, Unauthorized
from service.metrics.counters import REFUSED_KEYS
from service.settings import is_loopback
from service.tenants.keys import Caller, caller_of, local_caller
from service.tenants.rate import count_request

INSUFFICIENT = "insufficient_permissions"
log = structlog.get_logger()
_bearer = HTTPBearer(auto_error=False, description="An API key created with `batchweave keys create`.")


def check_local(request: Request) -> None:
    """Raise Forbidden unless the request is for a local host name, and not from a page of another origin.

    Without this check, a web page could use DNS rebinding to reach a service that requires no keys.
    """
    host = request.headers.get("host", "")
    own = f"{request.url.scheme}://{host}"
    origins = request.headers.getlist("origin")
    try:
        name = request.url.hostname
    except ValueError:
        name = None
    # A page of another local service is not ours, although its host name is local too.
    if not name or "@" in host or not is_loopback(name) or len(origins) > 1 or any(each != own for each in origins):
        message = (
            "Without API keys, the service answers only requests to local addresses and from its own pages. "
            "Set BATCHWEAVE_AUTH=keys to allow others."
        )
        raise Forbidden(message, code="not_local")


async def find_caller(database: Database, clock: Callable[[], float], key: str | None) -> Caller | None:
    """Return the caller with this API key, or the one that everyone is without keys; None if the key is not valid."""
    async with database.read() as session:
        return await (local_caller(session) if key is None else caller_of(session, key, clock()))


Given = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def _key_in(request: Request, context: Context, given: Given) -> str | None:
    """Return the key of a call; None where the service requires none."""
    if not context.settings.needs_keys:
        check_local(request)
        return None
    if given is None:
        raise Unauthorized("Send an API key: Authorization: Bearer bw-…", code="missing_api_key")
    return given.credentials


def note_refused_key(request: Request, where: str) -> None:
    """Count and log a key that is not valid, with the address that sent it."""
    REFUSED_KEYS.labels(where).inc()
    log.warning("a key was refused", where=where, address=request.client.host if request.client else "")


async def _known(request: Request, context: Context, caller: Caller | None) -> Caller:
    """Count and name the request of a caller. Raises Unauthorized for a key that is not valid."""
    if caller is None:
        note_refused_key(request, "api")
        raise Unauthorized("The API key is unknown, revoked or expired.", code="invalid_api_key")
    request.state.key = caller.name or caller.actor
    know(request.scope)
    reader.set(caller.project.id)
    await count_request(context.redis, caller.project, context.clock())
    return caller


async def _anyone(request: Request, context: InContext, given: Given) -> Caller:
    key = _key_in(request, context, given)
    return await _known(request, context, await find_caller(context.database, context.clock, key))


async def _online(request: Request, context: InContext, given: Given) -> Caller:
    key = _key_in(request, context, given)
    return await _caller(await _known(request, context, await context.callers.get(key)))


async def _caller(caller: Annotated[Caller, Depends(_anyone)]) -> Caller:
    if caller.role is Role.MONITOR:
        message = "A key with the role 'monitor' can only read metrics and the list of workers."
        raise Forbidden(message, code=INSUFFICIENT)
    return caller


CalledBy = Annotated[Caller, Depends(_caller)]
CalledOnline = Annotated[Caller, Depends(_online)]  # as the database knew the caller at most a minute ago


async def _admin(caller: CalledBy) -> Caller:
    if not caller.administers:
        raise Forbidden("This needs a key with the role 'admin'.", code=INSUFFICIENT)
    return caller


CalledByAdmin = Annotated[Caller, Depends(_admin)]


async def _operator(caller: CalledBy) -> Caller:
    if not caller.operates:
        message = "This needs a key with the role 'operator', because it affects all projects."
        raise Forbidden(message, code=INSUFFICIENT)
    return caller


CalledByOperator = Annotated[Caller, Depends(_operator)]


async def _monitor(caller: Annotated[Caller, Depends(_anyone)]) -> Caller:
    if caller.role is not Role.MONITOR and not caller.operates:
        raise Forbidden("This needs a key with the role 'monitor' or 'operator'.", code=INSUFFICIENT)
    return caller


CalledByMonitor = Annotated[Caller, Depends(_monitor)]
