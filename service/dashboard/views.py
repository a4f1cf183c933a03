"""The dashboard's read-only pages. Nothing in this module changes state."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sse_starlette.sse import EventSourceResponse

from service.api import batches, content, files
from service.api.bodies import ObjectId
from service.api.context import Context, InContext
from service.api.pages import page_rows
from service.api.shapes import BatchObject
from service.api.worker_shapes import WorkerObject, WorkerState
from service.api.workers import WorkerName, alive_workers
from service.dashboard.answers import Found, first_url, request_of, search
from service.dashboard.filters import Filters
from service.dashboard.reach import as_owner, project_seen, seen_by
from service.dashboard.render import HEADERS, ROOT, page
from service.dashboard.schedule import drawing, stretches
from service.dashboard.sessions import LooksIn, LooksInAsAdmin, LooksInAsOperator, Viewer
from service.dashboard.standings import next_batches, standings
from service.db.moves import LIVE, TERMINAL
from service.db.tables import Batch, BatchStatus, File, Model
from service.db.tenant_tables import AuditEvent, Project
from service.endpoints import ENDPOINTS
from service.errors import NotFound, Unavailable
from service.jobs.historian import summed
from service.metrics.history import History
from service.queue.counts import Counts
from service.settings import variable

LISTED = 50
MOST_ROWS = 2**53
TICK_S = 2.0
STREAM_S = 600.0  # then the browser reconnects, so that a session that has ended gets no more events
STATIC = {"style.css", "dashboard.js", "htmx.min.js", "uPlot.iife.min.js", "uPlot.min.css"}
BESIDE_ONLINE = ("online_s", "batches_excess_s", "preempted", "parked", "left_out")  # of an engine's state
SECRETS = ("database_url", "redis_url", "storage_url", "engine_args", "otlp_endpoint", "secret_key")

router = APIRouter(prefix="/dashboard", include_in_schema=False)


@router.get("")
async def overview(request: Request, context: InContext, viewer: LooksIn) -> Response:
    mine = seen_by(viewer)
    async with context.database.read() as session:
        counts = await standings(session, mine, context.clock())
        rows = await next_batches(session, mine)
        projects = await _project_names(session) if viewer.is_operator else {}
    serving = await context.serving_cache.serving()
    return page(
        request,
        "overview.html",
        viewer,
        counts=counts,
        batches=await _shapes(context, rows),
        paces=await _paces(context, rows),
        owners=_owners(rows, projects),
        last=await History(context.redis).last() if viewer.is_operator else {},
        workers=await _workers(context) if viewer.is_operator else [],
        serving=sum(each.alive - each.draining for each in serving.values()),
        starting=max((each.starting_s for each in serving.values() if each.starting_s is not None), default=None),
    )


@router.get("/overview.json")
async def overview_points(context: InContext, _viewer: LooksInAsOperator) -> Response:
    return JSONResponse(await History(context.redis).points(), headers=HEADERS)


@router.get("/batches")
async def batch_list(
    request: Request,
    context: InContext,
    viewer: LooksIn,
    filters: Annotated[Filters, Depends()],
    after: ObjectId | None = None,
) -> Response:
    query = filters.of(select(Batch))
    async with context.database.read() as session:
        rows = await page_rows(session, Batch, query, project_seen(viewer), after=after, limit=LISTED)
        models = (await session.scalars(select(Model.name).order_by(Model.name))).all()
        projects = await _project_names(session) if viewer.is_operator else {}
    found = await _shapes(context, rows[:LISTED])
    return page(
        request,
        "batches.html",
        viewer,
        batches=found,
        paces=await _paces(context, rows[:LISTED]),
        models=models,
        projects=projects,
        owners=_owners(rows, projects),
        statuses=list(BatchStatus),
        filters=filters,
        more=urlencode({**filters.chosen, "after": found[-1].id}) if len(rows) > LISTED else None,
    )


@router.get("/batches/{batch_id}")
async def one_batch(
    request: Request,
    context: InContext,
    viewer: LooksIn,
    batch_id: ObjectId,
    kind: Annotated[str, Query(pattern="^(output|errors)$")] = "output",
    text: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    row = await _batch(context, viewer, batch_id)
    batch = await batches.shape(context, row)
    # A live refresh replaces only the live part of the page, and the list of requests is not in it.
    found = Found([], True) if "hx-request" in request.headers else await search(context, row, kind, text)
    timeline = [
        (name, getattr(batch, f"{name}_at"))
        for name in (
            "created",
            "in_progress",
            "finalizing",
            "completed",
            "failed",
            "expired",
            "cancelling",
            "cancelled",
        )
        if getattr(batch, f"{name}_at")
    ]
    return page(
        request,
        "batch.html",
        viewer,
        batch=batch,
        paces=await _paces(context, [row]),
        timeline=sorted(timeline, key=lambda each: each[1]),
        slices=await stretches(context.database, batch_id),
        drawn=await drawing(context.database, context.storage, batch_id),
        found=found,
        kind=kind,
        text=text,
        can_cancel=batch.status in ("validating", "in_progress"),
        can_retry=batch.status not in LIVE and batch.error_file_id is not None,
    )


@router.get("/batches/{batch_id}/points.json")
async def batch_points(context: InContext, viewer: LooksIn, batch_id: ObjectId) -> Response:
    batch = await _batch(context, viewer, batch_id)
    points = await History(context.redis).batch_points(batch_id)
    if batch.status in TERMINAL and batch.in_progress_at is not None:  # give even a short one a first and a last point
        counts = Counts.of_row(batch)
        ended_at = max(filter(None, (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.in_progress_at)))
        begun = [batch.in_progress_at, 0, 0, 0, 0]
        end = [ended_at, counts.completed, counts.failed, counts.input_tokens, counts.output_tokens]
        points = [begun, *(each for each in points if begun[0] < each[0] < ended_at)]
        if batch.status != BatchStatus.COMPLETED:  # the unanswered get their lines at the end, all at once
            points.append([ended_at, *points[-1][1:]])
        points.append(end)
    return JSONResponse(points, headers=HEADERS)


@router.get("/batches/{batch_id}/request")
async def one_request(
    request: Request,
    context: InContext,
    viewer: LooksIn,
    batch_id: ObjectId,
    custom_id: Annotated[str, Query(max_length=4096)],
) -> Response:
    asked, answer = await request_of(context, await _batch(context, viewer, batch_id), custom_id)
    return page(request, "request.html", viewer, batch_id=batch_id, custom_id=custom_id, asked=asked, answer=answer)


@router.get("/new")
async def new_batch(
    request: Request, context: InContext, viewer: LooksIn, file: ObjectId | None = None, problem: str = ""
) -> Response:
    uploaded, endpoint = None, ENDPOINTS[0]
    if file is not None:
        uploaded = await files.find_file(context, await as_owner(context, viewer, file), file)
        endpoint = await _endpoint_of(context, uploaded)
    return page(
        request, "new.html", viewer, file=uploaded, endpoint=endpoint, endpoints=ENDPOINTS, problem=problem[:500]
    )


@router.get("/files")
async def file_list(request: Request, context: InContext, viewer: LooksIn, after: ObjectId | None = None) -> Response:
    kept = select(File).where(File.deleted_at.is_(None))
    async with context.database.read() as session:
        rows = await page_rows(session, File, kept, project_seen(viewer), after=after, limit=LISTED)
        projects = await _project_names(session) if viewer.is_operator else {}
    more = rows[LISTED - 1].id if len(rows) > LISTED else None
    return page(request, "files.html", viewer, files=rows[:LISTED], more=more, projects=projects)


@router.get("/files/{file_id}/content")
async def file_content(request: Request, context: InContext, viewer: LooksIn, file_id: ObjectId) -> Response:
    answer = await content.get_content(file_id, request, context, await as_owner(context, viewer, file_id))
    answer.headers["Content-Disposition"] = f'attachment; filename="{file_id}.jsonl"'
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer


@router.get("/workers")
async def worker_list(
    request: Request,
    context: InContext,
    viewer: LooksInAsOperator,
    state: Annotated[str, Query(max_length=16)] = "",
    model: Annotated[str, Query(max_length=512)] = "",
) -> Response:
    found = await _workers(context)
    models = sorted({worker.model for worker in found or []})
    if found is not None:
        found = [each for each in found if state in ("", each.state) and model in ("", each.model)]
    return page(
        request,
        "workers.html",
        viewer,
        workers=found,
        states=get_args(WorkerState),
        models=models,
        state=state,
        model=model,
    )


@router.get("/online")
async def online_page(request: Request, context: InContext, viewer: LooksInAsOperator) -> Response:
    """Show what online requests get beside batches, by worker and class, and what each costs the other."""
    try:
        states = await context.heartbeat.alive()
    except (RedisError, OSError):
        return page(request, "online.html", viewer, workers=None)
    workers = [
        {
            **state,
            "classes": [each for rank in state.get("engine") or [] for each in rank.get("online_classes", ())],
            "total": summed([state]),
            "counts": {name: sum(rank.get(name, 0) for rank in state.get("engine") or []) for name in BESIDE_ONLINE},
        }
        for state in states
        if state.get("online")
    ]
    return page(request, "online.html", viewer, workers=workers)


@router.get("/workers/{name:path}/steps.json")
async def worker_steps(context: InContext, _viewer: LooksInAsOperator, name: WorkerName) -> Response:
    """Return the points of the chart of a worker's steps, from its first rank.

    Each point covers several steps: the first step's number, then seconds per step of compute, of KV reads and in all.
    """
    try:
        alive = await context.heartbeat.alive()
    except (RedisError, OSError):
        alive = []
    rank = next((each["engine"][0] for each in alive if each["name"] == name and each.get("engine")), {})
    every, series = rank.get("series_every", 1), rank.get("series", [])[:-1]  # the last one is not complete yet
    points = [[n * every, row[2] / every, row[3] / every, row[0] / every] for n, row in enumerate(series)]
    return JSONResponse(points, headers=HEADERS)


@router.get("/audit")
async def audit_log(
    request: Request,
    context: InContext,
    viewer: LooksInAsAdmin,
    before: Annotated[int, Query(ge=0, le=MOST_ROWS)] = MOST_ROWS,
) -> Response:
    query = select(AuditEvent, Project.name).join(Project, Project.id == AuditEvent.project_id)
    query = query.where(AuditEvent.seq < before).order_by(AuditEvent.seq.desc()).limit(LISTED + 1)
    if not viewer.is_operator:
        query = query.where(AuditEvent.project_id == viewer.caller.project.id)
    async with context.database.read() as session:
        rows = (await session.execute(query)).all()
    more = rows[LISTED - 1][0].seq if len(rows) > LISTED else None
    return page(request, "audit.html", viewer, events=rows[:LISTED], more=more)


@router.get("/settings")
async def running_settings(request: Request, context: InContext, viewer: LooksInAsOperator) -> Response:
    shown: list[tuple[str, str, str]] = []
    for name, about in type(context.settings).model_fields.items():
        value: Any = getattr(context.settings, name)
        if name in SECRETS and value:
            value = "set (hidden)"
        shown.append((variable(name), "" if value is None else str(value), about.description or ""))
    return page(request, "settings.html", viewer, settings=shown)


@router.get("/events")
async def events(viewer: LooksIn) -> Response:
    """Send a tick every two seconds; at each tick, pages refresh their live part."""

    async def ticks() -> AsyncIterator[dict[str, str]]:
        for number in range(int(STREAM_S / TICK_S)):
            yield {"event": "tick", "data": str(number)}
            await asyncio.sleep(TICK_S)

    return EventSourceResponse(ticks(), headers=HEADERS)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in STATIC:
        raise NotFound(f"No such file: {name[:64]}")
    return FileResponse(
        ROOT / "static" / name, headers={"Cache-Control": "max-age=3600", "X-Content-Type-Options": "nosniff"}
    )


async def _batch(context: Context, viewer: Viewer, batch_id: str) -> Batch:
    caller = await as_owner(context, viewer, batch_id)
    async with context.database.read() as session:
        return await batches.find_batch(session, caller, batch_id)


async def _shapes(context: Context, rows: Sequence[Batch]) -> list[BatchObject]:
    return [await batches.shape(context, row) for row in rows]


async def _paces(context: Context, rows: Sequence[Batch]) -> dict[str, float]:
    """Return tokens per second by batch ID, for the batches that have not ended."""
    return await History(context.redis).paces([row.id for row in rows if row.status in LIVE], context.clock())


def _owners(rows: Sequence[Batch], projects: dict[str, str]) -> dict[str, str]:
    """Return the project name of each batch, by batch ID; empty if the viewer sees only one project."""
    return {row.id: projects[row.project_id] for row in rows if projects}


async def _project_names(session: AsyncSession) -> dict[str, str]:
    """Return the names of all projects by ID, sorted by name."""
    return {key: name for key, name in await session.execute(select(Project.id, Project.name).order_by(Project.name))}


async def _workers(context: Context) -> list[WorkerObject] | None:
    """Return the workers that are alive; None if Redis, which alone knows them, is unavailable."""
    try:
        return await alive_workers(context)
    except Unavailable:
        return None


async def _endpoint_of(context: Context, file: File) -> str:
    """Return the endpoint that the file's first line names.

    If the line names none of ours, return our first endpoint: the validation will report the error.
    """
    url = await first_url(context, file)
    return url if url in ENDPOINTS else ENDPOINTS[0]
