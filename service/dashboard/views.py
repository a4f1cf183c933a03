"""The dashboard's read-only pages. Nothing in this module changes state."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from redis.exceptions import RedisError
from sqlalchemy import Select, case, func, select
from sse_starlette.sse import EventSourceResponse

from service.api import content
from service.api.bodies import ObjectId
from service.api.context import InContext
from service.api.pages import listed, page_rows
from service.api.worker_shapes import WorkerState
from service.api.workers import WorkerName
from service.dashboard.charts import EVENT_WORDS, RANGES, ranged
from service.dashboard.overview import known_events, known_workers, untimed
from service.dashboard.reach import as_owner, note_read, project_seen
from service.dashboard.render import HEADERS, ROOT, page
from service.dashboard.sessions import LooksIn, LooksInAsAdmin, LooksInAsOperator
from service.dashboard.settings_list import grouped
from service.dashboard.shown import project_names
from service.db.tables import File
from service.db.tenant_tables import ApiKey, AuditEvent, Project
from service.errors import NotFound
from service.jobs.historian import summed
from service.queue.progress import Event
from service.settings import Settings, variable

LISTED = 50
LATELY_S = 600.0  # in which deaths of a worker that starts again are counted
MOST_SUMMED = 10_000  # files, deleted ones too, that a look at their page adds up
MOST_ROWS = 2**53
TICK_S = 2.0
STREAM_S = 600.0  # then the browser reconnects, so that a session that has ended gets no more events
STATIC = {path.name for path in (ROOT / "static").iterdir()} - {"README.md"}
BESIDE_ONLINE = ("online_s", "batches_excess_s", "preempted", "parked", "left_out")  # of an engine's state
SECRETS = ("database_url", "redis_url", "storage_url", "engine_args", "otlp_endpoint", "secret_key")

router = APIRouter(prefix="/dashboard", include_in_schema=False)


@router.get("/files")
async def file_list(request: Request, context: InContext, viewer: LooksIn, after: ObjectId | None = None) -> Response:
    kept = select(File).where(File.deleted_at.is_(None))
    async with context.database.read() as session:
        rows = await page_rows(session, File, kept, project_seen(viewer), after=after, limit=LISTED)
        projects = await project_names(session) if viewer.is_operator else {}
        total = (await session.execute(_sizes(project_seen(viewer)))).one()
    more = rows[LISTED - 1].id if len(rows) > LISTED else None
    return page(
        request,
        "files.html",
        viewer,
        files=rows[:LISTED],
        more=more,
        projects=projects,
        total=total,
        most=MOST_SUMMED,
    )


def _sizes(project_id: str | None) -> Select[int, int, Any]:
    """Return a query for how many of the newest files it has looked at, those that are kept, and their bytes."""
    mine, place = listed(File, project_id)
    newest = select(File.size_bytes, File.deleted_at).where(mine).order_by(*(each.desc() for each in place))
    some = newest.limit(MOST_SUMMED).subquery()
    kept = case((some.c.deleted_at.is_(None), some.c.size_bytes))
    return select(
        func.count().label("seen"),
        func.count(kept).label("count"),
        func.coalesce(func.sum(kept), 0).label("size_bytes"),
    ).select_from(some)


@router.get("/files/{file_id}/content")
async def file_content(request: Request, context: InContext, viewer: LooksIn, file_id: ObjectId) -> Response:
    owner = await as_owner(context, viewer, file_id)
    found = await content.get_content(file_id, request, context, owner)
    await note_read(context, viewer, owner, file_id)
    return found


@router.get("/workers")
async def worker_list(
    request: Request,
    context: InContext,
    viewer: LooksInAsOperator,
    state: Annotated[str, Query(max_length=16)] = "",
    model: Annotated[str, Query(max_length=512)] = "",
) -> Response:
    found, events = await known_workers(context), await known_events(context)
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
        untimed=untimed(found or []),
        events=events,
        deaths=_lately(events, context.clock()),
        words=EVENT_WORDS,
    )


def _lately(events: Sequence[Event], now: float) -> dict[str, list[str]]:
    """Return how each part died in the last ten minutes, the newest first."""
    found = dict[str, list[str]]()
    for each in events:
        if each.kind == "exit" and now - each.at < LATELY_S:
            found.setdefault(each.name, []).append(each.words)
    return found


@router.get("/online")
async def online_page(
    request: Request, context: InContext, viewer: LooksInAsOperator, range: Annotated[str, Query(max_length=8)] = ""
) -> Response:
    """Show what online requests get beside batches, by worker and class, and what each costs the other."""
    try:
        states = await context.heartbeat.alive()
    except (RedisError, OSError):
        return page(request, "online.html", viewer, workers=None, range=ranged(range), ranges=list(RANGES))
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
    return page(request, "online.html", viewer, workers=workers, range=ranged(range), ranges=list(RANGES))


@router.get("/workers/{name:path}/steps.json")
async def worker_steps(context: InContext, _viewer: LooksInAsOperator, name: WorkerName) -> Response:
    """Return the points of the chart of a worker's steps, from its first rank.

    Each point covers several steps: the first step's number, then ms per step of compute, of KV reads and in all.
    """
    try:
        alive = await context.heartbeat.alive()
    except (RedisError, OSError):
        alive = []
    rank = next((each["engine"][0] for each in alive if each["name"] == name and each.get("engine")), {})
    every, series = rank.get("series_every", 1), rank.get("series", [])[:-1]  # the last one is not complete yet
    points = [[n * every, *(1000 * row[at] / every for at in (2, 3, 0))] for n, row in enumerate(series)]
    return JSONResponse({"points": points}, headers=HEADERS)


@router.get("/audit")
async def audit_log(
    request: Request,
    context: InContext,
    viewer: LooksInAsAdmin,
    before: Annotated[int, Query(ge=0, le=MOST_ROWS)] = MOST_ROWS,
) -> Response:
    query = select(AuditEvent, Project.name, ApiKey.name).join(Project, Project.id == AuditEvent.project_id)
    query = query.outerjoin(ApiKey, ApiKey.id == AuditEvent.actor)
    query = query.where(AuditEvent.seq < before).order_by(AuditEvent.seq.desc()).limit(LISTED + 1)
    if not viewer.is_operator:
        query = query.where(AuditEvent.project_id == viewer.caller.project.id)
    async with context.database.read() as session:
        rows = (await session.execute(query)).all()
    more = rows[LISTED - 1][0].seq if len(rows) > LISTED else None
    return page(request, "audit.html", viewer, events=rows[:LISTED], more=more)


@dataclass(frozen=True, slots=True)
class SettingShown:
    variable: str
    value: str
    default: str
    is_changed: bool
    about: str


@router.get("/settings")
async def running_settings(request: Request, context: InContext, viewer: LooksInAsOperator) -> Response:
    groups = {heading: [_setting(context.settings, name) for name in names] for heading, names in grouped().items()}
    every = [each for group in groups.values() for each in group]
    changed = sum(each.is_changed for each in every)
    return page(request, "settings.html", viewer, groups=groups, changed=changed, number=len(every))


def _setting(settings: Settings, name: str) -> SettingShown:
    about, value = Settings.model_fields[name], getattr(settings, name)
    default = about.get_default(call_default_factory=True)
    shown = "set (hidden)" if name in SECRETS and value else "" if value is None else str(value)
    told = "" if default is None else str(default)
    return SettingShown(variable(name), shown, told, value != default, about.description or "")


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
    return FileResponse(ROOT / "static" / name, headers={"Cache-Control": "max-age=3600"})
