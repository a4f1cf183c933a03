"""The overview: is all well, what waits, how fast it goes, and which deadlines come next."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from service.api.context import Context, InContext
from service.api.worker_shapes import WorkerObject
from service.api.workers import alive_workers
from service.dashboard.charts import RANGES, charted, marks, ranged
from service.dashboard.reach import seen_by
from service.dashboard.render import HEADERS, page, span
from service.dashboard.sessions import LooksIn, LooksInAsOperator
from service.dashboard.shown import Shown, project_names, shown
from service.dashboard.standings import due_batches, next_batches, standings, unchecked_since
from service.errors import Unavailable
from service.metrics.history import History
from service.queue.progress import Event

SILENT_S = 60  # planners note what all workers do every ten seconds
RECENTLY_S = 12 * 3600  # for how long a worker's death is told
NAMED = 3  # batches and workers in one notice

router = APIRouter(prefix="/dashboard", include_in_schema=False)
Range = Annotated[str, Query(max_length=8)]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that needs care, or an explanation of a wait. `is_bad`: somebody should act."""

    text: str
    is_bad: bool
    link: str | None = None


@router.get("")
async def overview(request: Request, context: InContext, viewer: LooksIn, range: Range = "") -> Response:
    now = context.clock()
    async with context.database.read() as session:
        counts = await standings(session, seen_by(viewer), now)
        rows = await next_batches(session, seen_by(viewer))
        due = await due_batches(session, seen_by(viewer))
        projects = await project_names(session) if viewer.is_operator else {}
        waits_since = await unchecked_since(session) if viewer.is_operator else None
    every = {row.id: row for row in (*rows, *due)}
    found = {each.batch.id: each for each in await shown(context, list(every.values()), projects)}
    batches, due = [found[row.id] for row in rows], [found[row.id] for row in due]
    workers = await known_workers(context) if viewer.is_operator else []
    last = await History(context.redis).last() if viewer.is_operator else {}
    notices = await _notices(context, due, workers, viewer.is_operator)
    if viewer.is_operator and workers is not None:
        if last and now - last["at"] > SILENT_S:
            notices.append(_planner_silent(f"No planner has reported for {span(now - last['at'])}"))
            last = {}  # the present is not known
        elif not last and waits_since is not None and now - waits_since > SILENT_S:
            notices.append(_planner_silent(f"A batch has waited to be checked for {span(now - waits_since)}"))
    return page(
        request,
        "overview.html",
        viewer,
        counts=counts,
        batches=batches,
        due=due,
        last=last,
        workers=workers,
        notices=notices,
        range=ranged(range),
        ranges=list(RANGES),
        none_timed=bool(workers) and len(untimed(workers)) == len(workers),
    )


@router.get("/overview.json")
async def overview_points(context: InContext, _viewer: LooksInAsOperator, range: Range = "") -> Response:
    """Return the points and the marks of the overview's charts, and the period that they cover."""
    now, span_s = context.clock(), RANGES[ranged(range)]
    told = marks(await known_events(context), now - span_s)
    points = charted(await History(context.redis).points(span_s, now))
    return JSONResponse({"from": now - span_s, "to": now, "points": points, "marks": told}, headers=HEADERS)


async def known_workers(context: Context) -> list[WorkerObject] | None:
    """Return the workers that are alive or starting; None if Redis, which alone knows them, is unavailable."""
    try:
        return await alive_workers(context)
    except Unavailable:
        return None


def untimed(workers: list[WorkerObject]) -> set[str]:
    """Return the workers on machines that the cost model does not describe, such as CPUs."""
    return {worker.id for worker in workers if not worker.is_timed}


async def known_events(context: Context) -> list[Event]:
    """Return what happened to workers, the newest first; empty if Redis is unavailable."""
    try:
        return (await context.heartbeat.events())[::-1]
    except (RedisError, OSError):
        return []


def _planner_silent(seen: str) -> Notice:
    text = f"{seen}: it seems that no planner runs. Until one does, new batches are neither checked nor planned, and "
    text += 'answered ones not completed. Nothing is lost. See "When something is wrong" in docs/operate.md.'
    return Notice(text, True)


async def _notices(
    context: Context, due: list[Shown], workers: list[WorkerObject] | None, is_operator: bool
) -> list[Notice]:
    now, found = context.clock(), list[Notice]()
    if workers is None:
        lost = "Nothing is lost; work continues when Redis is back."
        found.append(Notice(f"Redis is not responding, so it is not known which workers are alive. {lost}", True))
    found += _of_workers(workers or [])
    serving = await _serving(context, is_operator) if workers is not None else []
    found += serving
    if is_operator and workers is not None:
        found += await _deaths(context, now, bool(serving))
    bad = [each for each in due if each.batch.batchweave.outcome_warnings]
    late = [each for each in due if (slack := each.slack(now)) and slack[0] == "late"]
    for what, those in (("Many answers are not ok", bad), ("Expected to miss the deadline", late)):
        if those:
            names = ", ".join(each.name[:60] for each in those[:NAMED]) + (" and more" if len(those) > NAMED else "")
            found.append(Notice(f"{what}: {names}.", True, "/dashboard/batches"))
    return found


def _of_workers(workers: list[WorkerObject]) -> list[Notice]:
    found = list[Notice]()
    for worker in workers:
        if worker.state == "stalled":
            why = f"its engine has not finished a step for {span(worker.step_age_s)} while requests wait"
            found.append(Notice(f"{worker.id} is stalled: {why}. It restarts automatically.", True))
        if "emulated" in worker.machine:
            found.append(Notice(f"{worker.id}: {worker.machine}. None of its answers are real.", True))
        for gpu in worker.gpus:
            if gpu.is_lost or gpu.uncorrected_errors:
                what = "is lost" if gpu.is_lost else "has memory errors that ECC did not correct"
                found.append(Notice(f"{worker.id}: GPU {gpu.gpu} {what}.", True, "/dashboard/workers"))
    return found


async def _serving(context: Context, is_operator: bool) -> list[Notice]:
    serving = (await context.serving_cache.serving()).values()
    alive = sum(each.alive for each in serving)
    if alive > sum(each.draining for each in serving):
        return []
    starting = max((each.starting_s for each in serving if each.starting_s is not None), default=None)
    if starting is not None:
        return [Notice(f"A worker has been starting for {span(starting)}. Batches wait until it is ready.", False)]
    if not is_operator:
        return [Notice("No worker is taking work now. Batches wait until one does.", True)]
    if alive:
        text = "All workers are draining, so nothing new runs. Resume one, or start another."
    else:
        text = "No worker is alive, so nothing runs and no online request is answered. Nothing is lost."
    return [Notice(f'{text} See "When something is wrong" in docs/operate.md.', True, "/dashboard/workers")]


async def _deaths(context: Context, now: float, nobody_serves: bool) -> list[Notice]:
    events = await known_events(context)
    deaths = [each for each in events if each.kind in ("death", "exit") and now - each.at < RECENTLY_S]
    if not deaths:
        return []
    told = ", ".join(f"{each.name} {span(now - each.at)} ago" for each in deaths[:NAMED])
    more = f" and {len(deaths) - NAMED} more" if len(deaths) > NAMED else ""
    why = f" The last one: {deaths[0].words}." if deaths[0].words else ""
    text = f"Died or fell silent in the last {span(RECENTLY_S)}: {told}{more}.{why}"
    text += " What workers had waits for another." if nobody_serves else " What workers had goes to others."
    return [Notice(text, True, "/dashboard/workers")]
