"""The pages of batches: the list, one batch in five tabs, and one request."""

import asyncio
from collections import Counter
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select

from service.api import batches
from service.api.bodies import ObjectId
from service.api.context import Context, InContext
from service.api.pages import page_rows
from service.api.shapes import BatchError
from service.dashboard.answers import Wish, lines_of, neighbours, request_of, search
from service.dashboard.conversation import conversation_of
from service.dashboard.filters import Filters
from service.dashboard.overview import known_events, known_workers
from service.dashboard.reach import as_owner, note_read, project_seen, seen_by
from service.dashboard.render import HEADERS, page
from service.dashboard.schedule import boxes_of, scan_of, slice_bars, workers_of
from service.dashboard.sessions import LooksIn, Viewer
from service.dashboard.shown import BAD, Shown, project_names, shown
from service.dashboard.standings import GROUPS, MOST_COUNTED, group_counts
from service.dashboard.timeline import timeline
from service.db.moves import TERMINAL
from service.db.tables import Batch, File, Model
from service.db.tenant_tables import Project
from service.metrics.history import History
from service.queue.counts import Counts

LISTED = 50
NO_WORKERS = {"api", "planner", "redis"}  # parts of `up` whose ends are events too
LINES_SHOWN = 200  # of the errors of a file
TABS = {"": "Overview", "requests": "Requests", "errors": "Errors", "schedule": "Schedule", "files": "Files"}
TABS_OF_LIST = {
    "": "All",
    "running": "Running",
    "waiting": "Waiting",
    "held": "Held",
    "completed": "Completed",
    "failed": "Failed or expired",
    "cancelled": "Cancelled",
}

router = APIRouter(prefix="/dashboard", include_in_schema=False)
# Of which requests a list is. While a batch runs, nobody has noted which answers are not valid.
KINDS = {"answered": "answered", **BAD, "failed": "failed"}
Kind = Annotated[str, Query(pattern=f"^({'|'.join(KINDS)})$")]
Part = Annotated[str, Query(max_length=256)]  # of a custom_id
Place = Annotated[int, Query(ge=0, le=1 << 53)]  # the byte of a result file at which a line begins
Tab = Annotated[Literal["requests", "errors", "schedule", "files"], Path()]


@router.get("/batches")
async def batch_list(
    request: Request,
    context: InContext,
    viewer: LooksIn,
    filters: Annotated[Filters, Depends()],
    after: ObjectId | None = None,
) -> Response:
    query = filters.of(select(Batch))
    chosen = {name: value for name, value in filters.chosen.items() if name != "state"}
    project_id = project_seen(viewer)
    async with context.database.read() as session:
        if project_id is None and filters.project:  # none has the id ""
            project_id = await session.scalar(select(Project.id).where(Project.name == filters.project)) or ""
        rows = await page_rows(session, Batch, query, project_id, after=after, limit=LISTED)
        counts = await group_counts(session, seen_by(viewer)) if not chosen else {}
        models = (await session.scalars(select(Model.name).order_by(Model.name))).all()
        projects = await project_names(session) if viewer.is_operator else {}
    return page(
        request,
        "batches.html",
        viewer,
        batches=await shown(context, rows[:LISTED], projects),
        models=models,
        projects=projects,
        filters=filters,
        counts={name: f"{MOST_COUNTED - 1}+" if count == MOST_COUNTED else count for name, count in counts.items()},
        tabs={name: urlencode({**chosen, **({"state": name} if name else {})}) for name in ("", *GROUPS)},
        words=TABS_OF_LIST,
        more=urlencode({**filters.chosen, "after": rows[LISTED - 1].id}) if len(rows) > LISTED else None,
    )


@router.get("/batches/{batch_id}")
async def one_batch(request: Request, context: InContext, viewer: LooksIn, batch_id: ObjectId) -> Response:
    row = await _batch(context, viewer, batch_id)
    each, now = await _shown(context, viewer, row), context.clock()
    points = await History(context.redis).batch_points(batch_id)
    # Of workers that do not serve another model now; which model a dead one served is not known.
    others = {worker.id for worker in await known_workers(context) or [] if worker.model != row.model} | NO_WORKERS
    events = await known_events(context)
    deaths = [event for event in events if event.kind in ("death", "exit") and event.name not in others]
    return page(
        request,
        "batch_overview.html",
        viewer,
        **_head(request, each, ""),
        stages=timeline(each, points, deaths, now),
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
        points.append(end)
    return JSONResponse({"points": points}, headers=HEADERS)


@router.get("/batches/{batch_id}/errors.jsonl")
async def file_errors(context: InContext, viewer: LooksIn, batch_id: ObjectId) -> Response:
    """Return all errors of the batch's input file, one a line, to download."""
    errors = (await _batch(context, viewer, batch_id)).errors or []
    lines = "".join(BatchError(**error).model_dump_json() + "\n" for error in errors)
    name = f'attachment; filename="{batch_id}-errors.jsonl"'
    return Response(lines, media_type="application/jsonl", headers={**HEADERS, "Content-Disposition": name})


@router.get("/batches/{batch_id}/request")
async def one_request(
    request: Request,
    context: InContext,
    viewer: LooksIn,
    batch_id: ObjectId,
    custom_id: Annotated[str, Query(max_length=4096)],
    kind: Kind = "answered",
    text: Part = "",
    at: Place = 0,
) -> Response:
    """Show a request and its answer. The others are those of the list from which it was opened."""
    row = await _batch(context, viewer, batch_id, reads_texts=True)
    wish = Wish(kind, text)
    whole = await request_of(context, row, custom_id, wish, at)
    # Where the request is not known, the list has noted what its answer is worth.
    noted = None if isinstance(whole.asked, dict) else wish.outcome
    conversation = await asyncio.to_thread(conversation_of, whole.asked, whole.answer, whole.ok, noted)
    near = await neighbours(context, row, wish, whole) if at or whole.at == 0 else (None, None)
    each = await _shown(context, viewer, row)
    values: dict[str, Any] = {"whole": whole, "conversation": conversation, "near": near, "kind": kind, "text": text}
    return page(request, "request.html", viewer, each=each, custom_id=custom_id, **values)


@router.get("/batches/{batch_id}/{tab}")
async def batch_tab(
    request: Request,
    context: InContext,
    viewer: LooksIn,
    batch_id: ObjectId,
    tab: Tab,
    kind: Kind = "answered",
    text: Part = "",
    after: Place = 0,
) -> Response:
    is_part = _is_part(request)
    row = await _batch(context, viewer, batch_id, reads_texts=tab in ("requests", "errors", "schedule") and not is_part)
    each = await _shown(context, viewer, row)
    values: dict[str, Any] = {}
    if is_part and tab != "schedule":
        pass  # all of it stands below the live part
    elif tab == "requests":
        found = await search(context, row, Wish(kind, text), after)
        kinds = {name: word for name, word in KINDS.items() if name != "invalid" or not each.is_live}
        values = {"kind": kind, "text": text, "after": after, "found": found, "kinds": kinds}
    elif tab == "errors":
        values = await _errors(context, row, each)
    elif tab == "files":
        values = {"files": await _files_of(context, row)}
    else:
        slices = await slice_bars(context.database, batch_id)
        values = {"slices": slices, "workers": workers_of(slices), "scan": await scan_of(context, batch_id)}
        if not is_part:
            values["boxes"] = await boxes_of(context, values["scan"], row.project_id)
    return page(request, f"batch_{tab}.html", viewer, **_head(request, each, tab), **values)


def _is_part(request: Request) -> bool:
    """Return whether an open page asks again, and will replace its live part alone."""
    return "hx-request" in request.headers


def _head(request: Request, each: Shown, tab: str) -> dict[str, Any]:
    batch = each.batch
    return {
        "is_part": _is_part(request),
        "each": each,
        "tab": tab,
        "tabs": TABS,
        "can_cancel": batch.status in ("validating", "in_progress"),
        "can_retry": not each.is_live and batch.error_file_id is not None,
        "can_answer_again": not each.is_live and batch.output_file_id is not None,
    }


async def _batch(context: Context, viewer: Viewer, batch_id: str, reads_texts: bool = False) -> Batch:
    caller = await as_owner(context, viewer, batch_id)
    async with context.database.read() as session:
        found = await batches.find_batch(session, caller, batch_id)
    if reads_texts:
        await note_read(context, viewer, caller, batch_id)
    return found


async def _shown(context: Context, viewer: Viewer, row: Batch) -> Shown:
    projects = dict[str, str]()
    if viewer.is_operator:
        async with context.database.read() as session:
            projects = await project_names(session)
    return (await shown(context, [row], projects))[0]


async def _errors(context: Context, row: Batch, each: Shown) -> dict[str, Any]:
    """Return the errors of the batch's file with the text of their lines, and how many there are of each code."""
    errors = each.batch.errors.data if each.batch.errors else []
    first = errors[:LINES_SHOWN]
    texts = await lines_of(context, row, {error.line for error in first if error.line is not None})
    return {
        "errors": first,
        "texts": texts,
        "total": len(errors),
        "codes": Counter(error.code for error in errors).most_common(),
    }


async def _files_of(context: Context, row: Batch) -> list[tuple[str, File]]:
    """Return the batch's files by what they are to it, without those that are deleted."""
    wanted = {"Input": row.input_file_id, "Results": row.output_file_id, "Errors": row.error_file_id}
    kept = select(File).where(File.id.in_([each for each in wanted.values() if each]), File.deleted_at.is_(None))
    async with context.database.read() as session:
        found = {file.id: file for file in await session.scalars(kept)}
    return [(name, found[file_id]) for name, file_id in wanted.items() if file_id in found]
