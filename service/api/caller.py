"""Who calls: every route of /v1 asks, and sees only what the caller's project owns."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.context import Here
from service.db.tables import Role
from service.errors import Forbidden, Unauthorized
from service.settings import is_loopback
from service.tenants.keys import Caller, caller_of, local_caller
from service.tenants.rate import count_request

INSUFFICIENT = "insufficient_permissions"
_bearer = HTTPBearer(auto_error=False, description="A key made by `batchweave keys create`.")


def check_local(request: Request) -> None:
    """Raises Forbidden for other names: by DNS rebinding a web page could reach a service that asks for no keys."""
    host = request.headers.get("host", "")
    own = f"{request.url.scheme}://{host}"
    origins = request.headers.getlist("origin")
    try:
        name = request.url.hostname
    except ValueError:
        name = None
    # A page of another local service is not ours, though its name is local too.
    if not name or "@" in host or not is_loopback(name) or len(origins) > 1 or any(each != own for each in origins):
        message = "Without keys the API answers to local addresses and its own pages only: set BATCHWEAVE_AUTH=keys."
        raise Forbidden(message, code="not_local")


async def _anyone(
    request: Request, here: Here, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    if not here.settings.needs_keys:
        check_local(request)
    async with here.database.read() as session:
        if not here.settings.needs_keys:
            caller = await local_caller(session)
        elif given is None:
            raise Unauthorized("Send an API key: Authorization: Bearer bw-…", code="missing_api_key")
        else:
            found = await caller_of(session, given.credentials, here.clock())
            if found is None:
                raise Unauthorized("The API key is unknown, revoked or has expired.", code="invalid_api_key")
            caller = found
    request.state.key = caller.name or caller.actor
    await count_request(here.redis, caller.project, here.clock())
    return caller


async def _caller(caller: Annotated[Caller, Depends(_anyone)]) -> Caller:
    if caller.role is Role.MONITOR:
        raise Forbidden("A key with the role 'monitor' reads figures and nothing else.", code=INSUFFICIENT)
    return caller


CalledBy = Annotated[Caller, Depends(_caller)]


async def _admin(caller: CalledBy) -> Caller:
    if not caller.administers:
        raise Forbidden("This needs a key with the role 'admin'.", code=INSUFFICIENT)
    return caller


CalledByAdmin = Annotated[Caller, Depends(_admin)]


async def _operator(caller: CalledBy) -> Caller:
    if not caller.operates:
        raise Forbidden("This needs a key with the role 'operator': all projects depend on it.", code=INSUFFICIENT)
    return caller


CalledByOperator = Annotated[Caller, Depends(_operator)]


async def _monitor(caller: Annotated[Caller, Depends(_anyone)]) -> Caller:
    if caller.role is not Role.MONITOR and not caller.operates:
        raise Forbidden("This needs a key with the role 'monitor' or 'operator'.", code=INSUFFICIENT)
    return caller


CalledByMonitor = Annotated[Caller, Depends(_monitor)]
