"""The planner role: every job of the control plane in one loop each, safe to run in several processes."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import structlog
from redis.asyncio import Redis
from sqlalchemy.dialects import postgresql, sqlite

from service.db.sessions import Database
from service.db.tables import Model
from service.jobs.expiry import Expiry
from service.jobs.finalizer import Finalizer
from service.jobs.historian import Historian
from service.jobs.planner import Planner
from service.jobs.previewer import Previewer
from service.jobs.reconciler import Reconciler
from service.jobs.sweeper import Sweeper
from service.jobs.validator import Validator
from service.jobs.webhooks import Webhooks
from service.metrics.counters import JOB_FAILURES, JOBS
from service.settings import Settings
from service.storage import Storage

SWEEP_S = 60.0
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a worker knows of the model that it serves: tokens of prompt and answer, and its endpoints."""

    context_length: int
    endpoints: list[str]


async def register_model(database: Database, settings: Settings, abilities: Abilities | None = None) -> None:
    """Make the configured model known, and what a worker says of it.

    The planner's source counts, since it is the one that reads it.
    """
    row = {
        "name": settings.served_model,
        "source": settings.model_source,
        "created_at": int(time.time()),
        **(asdict(abilities) if abilities else {}),
    }
    told = ("source",) if abilities is None else ("context_length", "endpoints")
    async with database.write() as session:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        statement = insert(Model).values(row)
        await session.execute(
            statement.on_conflict_do_update(index_elements=["name"], set_={name: row[name] for name in told})
        )


async def run_jobs(database: Database, storage: Storage, redis: Redis, settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`; a job that fails is logged and tried again."""
    clock = time.time
    await register_model(database, settings)
    # Several loops of one job work on several batches at once, so that a large one does not hold up the small.
    jobs: list[tuple[str, Callable[[], Awaitable[object]], float, int]] = [
        ("validator", Validator(database, storage, settings, clock).run_once, settings.poll_s, 3),
        ("planner", Planner(database, storage, settings, clock).run_once, settings.poll_s, 1),
        ("previewer", Previewer(database, storage, settings, clock).run_once, settings.poll_s, 1),
        ("reconciler", Reconciler(database, redis, settings.lease_s, clock).run_once, settings.poll_s * 2, 1),
        ("finalizer", Finalizer(database, storage, clock).run_once, settings.poll_s, 3),
        ("expiry", Expiry(database, storage, clock).run_once, 1.0, 1),
        ("webhooks", Webhooks(database, settings, clock).run_once, settings.poll_s, 4),
        ("historian", Historian(database, redis, clock).run_once, 1.0, 1),
        ("sweeper", Sweeper(database, storage, clock).run_once, SWEEP_S, 1),
    ]
    async with asyncio.TaskGroup() as group:
        for name, run_once, pause_s, loops in jobs:
            for _ in range(loops):
                group.create_task(_repeat(name, run_once, pause_s, stop))


async def _repeat(name: str, run_once: Callable[[], Awaitable[object]], pause_s: float, stop: asyncio.Event) -> None:
    failures = 0
    while not stop.is_set():
        try:
            started = perf_counter()
            if await run_once():
                JOBS.labels(name).observe(perf_counter() - started)
            failures = 0
        except Exception:  # the edge of a job: nothing is lost, the next round sees the same rows
            failures += 1
            JOB_FAILURES.labels(name).inc()
            log.exception("job failed", job=name, failures=failures)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(pause_s * 2 ** min(failures, 10), max(pause_s, 30.0))):
                await stop.wait()
