"""Identifies viewers by a session cookie instead of a key, and refuses forms that other sites send."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.caller import check_local
from service.api.connections import know
from service.api.context import InContext
from service.db.tenant_tables import ApiKey, DashboardSession, Project, Role
from service.errors import Forbidden
from service.tenants import audit
from service.tenants.keys import Caller, caller_of, local_caller
from service.tenants.rate import count_request

COOKIE = "batchweave_session"
SESSION_S = 12 * 3600


class SignInNeeded(Exception):
    """The browser is not signed in; the requested page can be shown once it is."""


@dataclass(frozen=True, slots=True)
class Viewer:
    caller: Caller
    token: str | None  # of its session; None if the service requires no keys

    @property
    def is_admin(self) -> bool:
        return self.caller.administers

    @property
    def is_operator(self) -> bool:
        return self.caller.operates


async def viewer_of(request: Request, context: InContext) -> Viewer:
    """Return the viewer who sent this request.

    Raises SignInNeeded, or Forbidden if the service requires no keys and the address is not local.
    """
    if not context.settings.needs_keys:
        check_local(request)
        async with context.database.read() as session:
            local = await local_caller(session)
        await count_request(context.redis, local.project, context.clock())
        return Viewer(local, None)
    token = request.cookies.get(COOKIE, "")
    async with context.database.read() as session:
        caller = await _signed_in(session, token, int(context.clock()))
    if caller is None:
        raise SignInNeeded
    request.state.key = caller.name
    know(request.scope)
    await count_request(context.redis, caller.project, context.clock())
    return Viewer(caller, token)


LooksIn = Annotated[Viewer, Depends(viewer_of)]


async def changer_of(request: Request, viewer: LooksIn) -> Viewer:
    """Return the viewer if the form comes from one of our own pages. Raises Forbidden if it does not."""
    check_form(request)
    return viewer


Changes = Annotated[Viewer, Depends(changer_of)]


async def admin_of(viewer: LooksIn) -> Viewer:
    if not viewer.is_admin:
        raise Forbidden("This page needs a key with the role 'admin'.", code="insufficient_permissions")
    return viewer


LooksInAsAdmin = Annotated[Viewer, Depends(admin_of)]


async def operator_of(viewer: LooksIn) -> Viewer:
    if not viewer.is_operator:
        raise Forbidden("This page needs a key with the role 'operator'.", code="insufficient_permissions")
    return viewer


LooksInAsOperator = Annotated[Viewer, Depends(operator_of)]


async def changing_operator_of(viewer: Changes) -> Viewer:
    return await operator_of(viewer)


ChangesAsOperator = Annotated[Viewer, Depends(changing_operator_of)]


def check_form(request: Request) -> None:
    """Refuse a form that no page of ours has sent.

    Every browser names the page's origin in a header that no script can set, so a form needs no secret of its own
    (docs/decisions.md). Over plain HTTP from another machine browsers send `Origin` alone.
    """
    site = request.headers.get("sec-fetch-site")
    origin, host = request.headers.get("origin", ""), request.headers.get("host")
    is_ours = site in ("same-origin", "none") if site else bool(host) and origin.partition("://")[2] == host
    if not is_ours:
        raise Forbidden(
            "This form was not sent by a page of this service. Reload the page, and try again.", code="csrf"
        )


async def sign_in(session: AsyncSession, key: str, now: int) -> str | None:
    """Create a session and return its token; None if the key is invalid or may not sign in."""
    caller = await caller_of(session, key.strip(), now)
    if caller is None or caller.role is Role.MONITOR:
        return None
    token = secrets.token_urlsafe(32)
    await session.execute(delete(DashboardSession).where(DashboardSession.expires_at <= now))
    session.add(DashboardSession(digest=_digest(token), key_id=caller.actor, expires_at=now + SESSION_S))
    audit.note(session, caller, "session.sign_in", caller.actor, now)
    return token


async def sign_out(session: AsyncSession, caller: Caller, token: str, now: float) -> None:
    await session.execute(delete(DashboardSession).where(DashboardSession.digest == _digest(token)))
    audit.note(session, caller, "session.sign_out", caller.actor, now)


def set_cookie(request: Request, response: Response, token: str) -> None:
    """Set the session cookie.

    SameSite=Lax: a link from another site opens the page signed in; a form on another site is sent without the cookie.
    """
    secure = request.url.scheme == "https"
    response.set_cookie(
        COOKIE, token, max_age=SESSION_S, path="/dashboard", httponly=True, samesite="lax", secure=secure
    )


async def _signed_in(session: AsyncSession, token: str, now: int) -> Caller | None:
    good = (DashboardSession.digest == _digest(token)) & (DashboardSession.expires_at > now)
    kept = ApiKey.revoked_at.is_(None) & (ApiKey.expires_at.is_(None) | (ApiKey.expires_at > now))
    found = (
        await session.execute(
            select(ApiKey, Project)
            .join(DashboardSession, DashboardSession.key_id == ApiKey.id)
            .join(Project, Project.id == ApiKey.project_id)
            .where(good, kept)
        )
    ).one_or_none()
    return Caller(found[1], found[0].id, Role(found[0].role), found[0].name) if found else None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
