"""The operators' pages for projects, quotas and keys; `batchweave projects` and `batchweave keys` do the same."""

from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.bodies import ObjectId
from service.api.context import Context, InContext
from service.dashboard.render import page
from service.dashboard.sessions import ChangesAsOperator, LooksInAsOperator, Viewer
from service.db.moves import LIVE
from service.db.tables import Batch
from service.db.tenant_tables import ApiKey, Project, Role, Tier
from service.errors import NotFound, TenantError
from service.tenants import changes

router = APIRouter(prefix="/dashboard", include_in_schema=False)
Name = Annotated[str, Form(max_length=128)]
MOST = 2**53
NO_KEYS = "This service requires no API keys. Create one with `batchweave keys create` and set BATCHWEAVE_AUTH=keys."
Quota = Annotated[int | None, Form(ge=0, le=MOST)]
Rate = Annotated[int | None, Form(ge=1, le=MOST)]  # with 0, the form that undoes it would be refused too
Weight = Annotated[float, Form(ge=changes.LEAST_WEIGHT, le=changes.MOST_WEIGHT)]


@router.get("/projects")
async def project_list(request: Request, context: InContext, viewer: LooksInAsOperator) -> Response:
    return await _list(request, context, viewer, "")


@router.post("/projects")
async def create_project(request: Request, context: InContext, viewer: ChangesAsOperator, name: Name) -> Response:
    try:
        async with context.database.write() as session:
            await changes.create_project(session, name, viewer.caller.actor, int(context.clock()))
    except TenantError as error:
        return await _list(request, context, viewer, str(error))
    return RedirectResponse("/dashboard/projects", status_code=303)


@router.get("/projects/{project_id}")
async def one_project(
    request: Request, context: InContext, viewer: LooksInAsOperator, project_id: ObjectId
) -> Response:
    async with context.database.read() as session:
        project = await _project(session, project_id)
    return page(request, "project.html", viewer, project=project, tiers=list(Tier))


@router.post("/projects/{project_id}")
async def change_project(
    request: Request,
    context: InContext,
    viewer: ChangesAsOperator,
    project_id: ObjectId,
    weight: Weight,
    max_batches: Quota = None,
    max_enqueued_tokens: Quota = None,
    max_bytes: Quota = None,
    max_requests_per_minute: Rate = None,
    tier: Annotated[Tier | None, Form()] = None,
    remembers_lengths: Annotated[bool | None, Form()] = None,
) -> Response:
    """Change the weight and quotas. An empty field removes its quota; a field missing from the form changes nothing."""
    fields = {
        "weight": weight,
        "max_batches": max_batches,
        "max_enqueued_tokens": max_enqueued_tokens,
        "max_bytes": max_bytes,
        "max_requests_per_minute": max_requests_per_minute,
        "tier": tier,
        "remembers_lengths": remembers_lengths,
    }
    form = await request.form()
    wanted = {name: value for name, value in fields.items() if name in form}
    if tier is None:  # an empty field; a project always has one
        wanted.pop("tier", None)
    async with context.database.write() as session:
        project = await _project(session, project_id)
        await changes.change_project(session, project, wanted, viewer.caller.actor, int(context.clock()))
    return RedirectResponse("/dashboard/projects", status_code=303)


@router.post("/keys")
async def create_key(
    request: Request,
    context: InContext,
    viewer: ChangesAsOperator,
    name: Name,
    project: Annotated[ObjectId, Form()],
    role: Annotated[Role, Form()] = Role.USER,
    days: Annotated[int | None, Form(ge=1, le=changes.LONGEST_DAYS)] = None,
) -> Response:
    """Create a key and show it, on this page only. Reloading the page creates another key, as browsers warn."""
    if not context.settings.needs_keys:  # anyone on this machine could create one, still valid once keys are required
        return await _list(request, context, viewer, NO_KEYS)
    try:
        async with context.database.write() as session:
            owner = await _project(session, project)
            text, _ = await changes.create_key(
                session, owner, name, role, days, viewer.caller.actor, int(context.clock())
            )
    except TenantError as error:
        return await _list(request, context, viewer, str(error))
    return page(request, "key.html", viewer, whose=name, project=owner.name, role=role, key=text)


@router.post("/keys/{key_id}/revoke")
async def revoke_key(request: Request, context: InContext, viewer: ChangesAsOperator, key_id: ObjectId) -> Response:
    try:
        async with context.database.write() as session:
            await changes.revoke_key(session, key_id, viewer.caller.actor, int(context.clock()))
    except TenantError as error:
        return await _list(request, context, viewer, str(error))
    return RedirectResponse("/dashboard/projects", status_code=303)


async def _project(session: AsyncSession, project_id: str) -> Project:
    found = await session.get(Project, project_id)
    if found is None:
        raise NotFound(f"No such project: {project_id}")
    return found


async def _list(request: Request, context: Context, viewer: Viewer, problem: str) -> Response:
    async with context.database.read() as session:
        projects = (await session.scalars(select(Project).order_by(Project.name))).all()
        keys = (await session.scalars(select(ApiKey).order_by(ApiKey.created_at.desc()))).all()
        left = func.sum(Batch.total - Batch.completed - Batch.failed)
        counted = await session.execute(
            select(Batch.project_id, func.count(), left).where(Batch.status.in_(LIVE)).group_by(Batch.project_id)
        )
        live = {project: (count, int(requests or 0)) for project, count, requests in counted}
    return page(request, "projects.html", viewer, projects=projects, keys=keys, live=live, problem=problem)
