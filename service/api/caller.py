"""Who calls: every route of /v1 asks, and sees only what the caller's project owns."""

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.context import Here
from service.errors import Forbidden, Unauthorized
from service.settings import is_loopback
from service.tenants.keys import Caller, caller_of, local_caller
from service.tenants.rate import count_request

_bearer = HTTPBearer(auto_error=False, description="A key made by `batchweave keys create`.")


def check_local(request: Request) -> None:
    """Raises Forbidden for other names: by DNS rebinding a web page could reach a service that asks for no keys."""
    try:
        names = [request.url.hostname, urlsplit(request.headers.get("origin", "http://localhost")).hostname]
    except ValueError:
        names = [None]
    if not all(name and is_loopback(name) for name in names):
        message = "Without keys the API answers to local addresses only. Set BATCHWEAVE_AUTH=keys and make a key."
        raise Forbidden(message, code="not_local")


async def _caller(
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
    await count_request(here.redis, caller.project, here.clock())
    return caller


CalledBy = Annotated[Caller, Depends(_caller)]


async def _admin(caller: CalledBy) -> Caller:
    if not caller.administers:
        raise Forbidden("This needs a key with the role 'admin'.", code="insufficient_permissions")
    return caller


CalledByAdmin = Annotated[Caller, Depends(_admin)]
