"""Metrics of what waits and runs in the whole service, read from SQL at each scrape: equal from every API process."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from redis.exceptions import RedisError
from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import LIVE
from service.db.sessions import Database
from service.db.tables import Batch, SliceBatch, SliceStatus, WebhookDelivery, fixed
from service.objects.storage import Room
from service.queue.progress import Heartbeat

PREFIX = "batchweave_"
# Maps each gauge's name to its HELP text and labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "batches": ("Unfinished batches, by status", ("status",)),
    "slices": ("Slices that are not done, by status; a shared slice counts once per batch", ("model", "status")),
    "unfinished_requests": ("Requests in slices that are not done", ("model",)),
    "queue_oldest_seconds": ("Age of the oldest unfinished batch that is not held", ("model",)),
    "deadline_seconds": ("Time to the earliest deadline of an unfinished batch that is not held", ("model",)),
    "webhook_deliveries_waiting": ("Webhook deliveries neither delivered nor given up", ()),
    "workers": ("Workers with a current heartbeat", ("model",)),
}
DEATHS = "deaths"  # a counter
_MODEL = func.coalesce(Batch.model, "")
_LIVE = Batch.status.in_(LIVE)
# One pass over the rows of unfinished batches; held batches have no age and no deadline.
_BATCHES = (
    select(
        *(_MODEL, Batch.status, func.count()),
        func.sum(case((Batch.planned > 0, Batch.planned - Batch.completed - Batch.failed), else_=0)),
        *(func.sum(Batch.slices_left), func.sum(Batch.slices)),
        func.min(case((~Batch.held, func.coalesce(Batch.in_progress_at, Batch.created_at)))),
        func.min(case((~Batch.held, Batch.expires_at))),
    )
    .where(_LIVE)
    .group_by(_MODEL, Batch.status)
)
_LEASED = (
    select(_MODEL, func.count())
    .join(SliceBatch, SliceBatch.batch_id == Batch.id)
    .where(SliceBatch.status == fixed(SliceStatus.LEASED), _LIVE)
    .group_by(_MODEL)
)
_DELIVERIES = select(func.count()).where(WebhookDelivery.next_at.is_not(None))


async def queue_metrics(database: Database, heartbeat: Heartbeat, now: float) -> list[Metric]:
    async with database.read() as session:
        found = await figures(session, now)
    alive = await _alive_by_model(heartbeat)
    found["workers"] = {(model,): float(count) for model, count in alive.items()}
    died = CounterMetricFamily(PREFIX + DEATHS, "Workers and parts of `up` that ended without being told to")
    if (deaths := await _deaths(heartbeat)) is not None:
        died.add_metric([], deaths)
    families: list[Metric] = [died]
    for name, (about, labels) in GAUGES.items():
        family = GaugeMetricFamily(PREFIX + name, about, labels=labels)
        for values, figure in found.get(name, {}).items():
            family.add_metric(list(values), figure)
        families.append(family)
    return families


async def figures(session: AsyncSession, now: float) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the figures from SQL, by gauge name and label values."""
    rows: Sequence[Any] = (await session.execute(_BATCHES)).all()
    leased = dict((await session.execute(_LEASED)).tuples().all())
    found: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    for model, status, count, unfinished, left, slices, oldest_at, first_end in rows:
        found["batches"][(str(status),)] += count
        if slices:
            found["unfinished_requests"][(model,)] += float(unfinished)
            found["slices"][(model, "ready")] += float(left)
            found["slices"][(model, "leased")] += 0.0
        if oldest_at is not None:
            oldest, ends = found["queue_oldest_seconds"], found["deadline_seconds"]
            oldest[(model,)] = max(now - oldest_at, oldest.get((model,), 0.0))
            ends[(model,)] = min(first_end - now, ends.get((model,), first_end - now))
    for model, count in leased.items():
        found["slices"][(model, "leased")] = float(count)
        found["slices"][(model, "ready")] -= count
    found["webhook_deliveries_waiting"][()] = float((await session.execute(_DELIVERIES)).scalar_one())
    return found


def room_metrics(room: Room) -> list[Metric]:
    """Return the disk metrics of a local object storage."""
    free, kept = "Free bytes on the object storage's disk", "Bytes of the disk reserved from uploads"
    return [
        GaugeMetricFamily(f"{PREFIX}storage_free_bytes", free, room.free_bytes),
        GaugeMetricFamily(f"{PREFIX}storage_reserve_bytes", kept, room.reserve_bytes),
    ]


async def _deaths(heartbeat: Heartbeat) -> int | None:
    """Return the count; None without Redis, because a counter that falls to 0 would seem to start again."""
    try:
        return await heartbeat.deaths()
    except (RedisError, OSError):
        return None


async def _alive_by_model(heartbeat: Heartbeat) -> Counter[str]:
    try:
        return Counter(state["model"] for state in await heartbeat.alive())
    except (RedisError, OSError):
        return Counter()
