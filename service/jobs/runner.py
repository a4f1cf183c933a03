"""The planner role: every job of the control plane in one loop each, safe to run in several processes."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog
from redis.asyncio import Redis
from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Model
from service.jobs.expiry import Expiry
from service.jobs.finalizer import Finalizer
from service.jobs.planner import Planner
from service.jobs.reconciler import Reconciler
from service.jobs.validator import Validator
from service.queue.progress import Progress
from service.settings import Settings
from service.storage import Storage

log = structlog.get_logger()


async def register_model(database: Database, settings: Settings) -> None:
    """Make the configured model known, so that batches may name it before a worker is up."""
    async with database.write() as session:
        found = (await session.scalars(select(Model).where(Model.name == settings.served_model))).one_or_none()
        if found is None:
            session.add(Model(name=settings.served_model, source=settings.model_source, created_at=int(time.time())))
        else:
            found.source = settings.model_source


async def run_jobs(database: Database, storage: Storage, redis: Redis, settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop`; a job that fails is logged and tried again."""
    clock = time.time
    await register_model(database, settings)
    progress = Progress(redis)
    jobs: dict[str, tuple[Callable[[], Awaitable[int]], float]] = {
        "validator": (Validator(database, storage, settings, clock).run_once, settings.poll_s),
        "planner": (Planner(database, storage, settings, clock).run_once, settings.poll_s),
        "reconciler": (Reconciler(database, redis, settings.lease_s, clock).run_once, settings.poll_s * 2),
        "finalizer": (Finalizer(database, storage, progress, settings, clock).run_once, settings.poll_s),
        "expiry": (Expiry(database, storage, clock).run_once, 1.0),
    }
    async with asyncio.TaskGroup() as group:
        for name, (run_once, pause_s) in jobs.items():
            group.create_task(_repeat(name, run_once, pause_s, stop))


async def _repeat(name: str, run_once: Callable[[], Awaitable[int]], pause_s: float, stop: asyncio.Event) -> None:
    failures = 0
    while not stop.is_set():
        try:
            await run_once()
            failures = 0
        except Exception:  # the edge of a job: nothing is lost, the next round sees the same rows
            failures += 1
            log.exception("job failed", job=name, failures=failures)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(pause_s * 2**failures, 30.0))
