"""What waits and runs in the whole service, read from SQL when Prometheus asks: the same from every API process."""

from collections import Counter
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from redis.exceptions import RedisError
from sqlalchemy import Executable, func, select

from service.db.moves import LIVE
from service.db.sessions import Database
from service.db.tables import Batch, Slice, SliceBatch, SliceStatus, WebhookDelivery
from service.queue.progress import Heartbeat

PREFIX = "batchweave_"


@dataclass(frozen=True, slots=True)
class Gauge:
    name: str
    text: str
    labels: tuple[str, ...]
    rows: Executable  # the labels' values, then the figure


def gauges(now: float) -> list[Gauge]:
    unfinished = (
        select(Slice.model, func.coalesce(func.sum(SliceBatch.total), 0))
        .join(Slice, Slice.id == SliceBatch.slice_id)
        .join(Batch, Batch.id == SliceBatch.batch_id)
        .where(Slice.status != SliceStatus.DONE, Batch.status.in_(LIVE))
        .group_by(Slice.model)
    )
    live = Batch.status.in_(LIVE)
    wanted = live & ~Batch.held  # nobody waits for those that nobody started
    oldest = select(
        func.coalesce(Batch.model, ""), now - func.min(func.coalesce(Batch.in_progress_at, Batch.created_at))
    ).where(wanted)
    soonest = select(func.coalesce(Batch.model, ""), func.min(Batch.expires_at) - now).where(wanted)
    waiting = select(func.count()).where(WebhookDelivery.next_at.is_not(None))
    return [
        Gauge(
            "batches",
            "Batches by status",
            ("status",),
            select(Batch.status, func.count()).group_by(Batch.status),
        ),
        Gauge(
            "slices",
            "Slices of batches that have not ended, by status",
            ("model", "status"),
            select(Slice.model, Slice.status, func.count())
            .where(Slice.id.in_(select(SliceBatch.slice_id).join(Batch, Batch.id == SliceBatch.batch_id).where(live)))
            .group_by(Slice.model, Slice.status),
        ),
        Gauge("unfinished_requests", "Requests in slices that are not done", ("model",), unfinished),
        Gauge(
            "queue_oldest_seconds",
            "Age of the oldest batch that has not ended",
            ("model",),
            oldest.group_by(Batch.model),
        ),
        Gauge(
            "deadline_seconds",
            "Until the first deadline of a batch that has not ended",
            ("model",),
            soonest.group_by(Batch.model),
        ),
        Gauge("webhook_deliveries_waiting", "Deliveries that are not done", (), waiting),
    ]


async def queue_metrics(database: Database, heartbeat: Heartbeat, now: float) -> list[Metric]:
    families: list[Metric] = []
    async with database.read() as session:
        for gauge in gauges(now):
            family = GaugeMetricFamily(PREFIX + gauge.name, gauge.text, labels=gauge.labels)
            for *labels, value in (await session.execute(gauge.rows)).all():
                family.add_metric([str(each) for each in labels], float(value))
            families.append(family)
    workers = GaugeMetricFamily(PREFIX + "workers", "Workers that are alive", labels=("model",))
    for model, count in (await _alive_by_model(heartbeat)).items():
        workers.add_metric([model], count)
    return [*families, workers]


async def _alive_by_model(heartbeat: Heartbeat) -> Counter[str]:
    try:
        return Counter(state["model"] for state in await heartbeat.alive())
    except (RedisError, OSError):
        return Counter()
