"""The planner role: runs every job of the control plane in its own loops; safe to run in several processes."""

import asyncio
import contextlib
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import structlog
from redis.asyncio import Redis

from engine_ext import warm_up
from service.db.clock import DAY_S, SYNC_S, SharedClock
from service.db.lost_sessions import LOST_S, end_lost_sessions
from service.db.models import register_model
from service.db.sessions import Database
from service.estimates.model_costs import context_length_of
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
from service.metrics.history import EVERY_S
from service.objects.storage import Storage
from service.queue.bell import SELDOM_S, Bell, Job
from service.queue.progress import Heartbeat
from service.settings import Settings

SWEEP_S = 60.0
PLAN_S = 5.0  # requests wait to be planned until engines have little to do, and nothing rings then
EXPIRY_S = 5.0
REAP_S = 2.0
STOP_S = 5.0  # grace period at a stop for work in progress
log = structlog.get_logger()


async def run_jobs(database: Database, storage: Storage, redis: Redis, settings: Settings, stop: asyncio.Event) -> None:
    """Run all jobs until `stop`. A job that fails is logged and tried again."""
    clock, bell = SharedClock(database), Bell(redis, settings.poll_s)
    await clock.sync()
    compiling = await asyncio.to_thread(warm_up.begin)  # or the first batch would wait for it
    if compiling is not None:
        log.info("compiles the planner's loops, once: the first plan waits for it")
    length = await asyncio.to_thread(context_length_of, settings)
    await register_model(database, settings, length, knows_adapters=False)
    spare = Database(settings.database, settings.database_timeout_s, connections=1)
    lost_s = max(LOST_S, 2 * settings.database_timeout_s)  # after which a client has given up
    # Some jobs run several loops to work on several batches at once, so that a large batch does not hold up small ones.
    jobs = [
        _Work(Job.VALIDATOR, Validator(database, storage, settings, clock, Heartbeat(redis)).run_once, loops=3),
        _Work(Job.PLANNER, Planner(database, storage, settings, clock, redis).run_once, seldom_s=PLAN_S),
        _Work(Job.PREVIEWER, Previewer(database, storage, settings, clock).run_once),
        _Work(
            Job.RECONCILER,
            Reconciler(database, redis, settings.lease_s, clock).run_once,
            seldom_s=min(10.0, settings.lease_s / 3),
            rest_s=0.1,
        ),
        _Work(Job.FINALIZER, Finalizer(database, storage, clock).run_once, loops=3),
        _Work(Job.EXPIRY, Expiry(database, storage, clock).run_once, seldom_s=EXPIRY_S),
        _Work(Job.WEBHOOKS, Webhooks(database, settings, clock).run_once, seldom_s=10.0, loops=4),
        _Work(Job.HISTORIAN, Historian(database, redis, clock).run_once, seldom_s=EVERY_S),
        _Work(
            Job.SWEEPER,
            Sweeper(database, storage, clock, settings.newest_backup, settings.keep_days * DAY_S).run_once,
            seldom_s=SWEEP_S,
        ),
        # In a loop and with a connection of its own, because the locks that it frees hold up other jobs.
        _Work(Job.LOST_SESSIONS, partial(end_lost_sessions, spare, lost_s), seldom_s=lost_s / 2),
    ]
    try:
        async with asyncio.TaskGroup() as group:
            if compiling is not None:
                group.create_task(_reap(compiling, stop))
            tasks = [group.create_task(bell.listen(stop)), group.create_task(_keep_time(clock, stop))]
            for work in jobs:
                for number in range(work.loops):
                    tasks.append(group.create_task(_repeat(work, bell, stop, is_first=number == 0)))
            await stop.wait()
            # Work that takes minutes, such as validating a large file, is restarted by the next process.
            await asyncio.wait(tasks, timeout=STOP_S)
            for task in tasks:
                task.cancel()
    finally:
        await spare.close()


async def _reap(process: "subprocess.Popen[bytes]", stop: asyncio.Event) -> None:
    """Wait for the end of a child, and say if it failed."""
    while process.poll() is None and not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await stop.wait()
    if process.returncode:
        log.warning("the loops were not compiled: each process compiles for itself", code=process.returncode)


@dataclass(frozen=True, slots=True)
class _Work:
    """A job, and how often it looks for work when it is not woken (`seldom_s`).

    `rest_s`: pause between rounds, for a job that every worker wakes.
    """

    job: Job
    run_once: Callable[[], Awaitable[object]]
    seldom_s: float = SELDOM_S
    loops: int = 1
    rest_s: float = 0.0


# The jobs to wake after a job has done something.
_AFTER = {
    Job.VALIDATOR: (Job.PLANNER, Job.PREVIEWER, Job.WEBHOOKS),
    Job.PLANNER: (Job.RECONCILER,),
    Job.FINALIZER: (Job.WEBHOOKS,),
    Job.EXPIRY: (Job.FINALIZER, Job.WEBHOOKS),
}
# One round of these jobs does all there is to do.
_WHOLE = {Job.RECONCILER, Job.EXPIRY, Job.HISTORIAN, Job.SWEEPER, Job.LOST_SESSIONS}


async def _repeat(work: _Work, bell: Bell, stop: asyncio.Event, is_first: bool) -> None:
    """Repeat a job until `stop`. Its first loop also looks for work by itself; the others wait to be woken."""
    failures, name = 0, work.job.value
    while not stop.is_set():
        found: object = False
        try:
            started = perf_counter()
            found = await work.run_once()
            if found:
                JOBS.labels(name).observe(perf_counter() - started)
                await bell.ring(*_AFTER.get(work.job, ()))
            failures = 0
        except Exception:  # the boundary of a job: nothing is lost, the next round sees the same rows
            failures += 1
            JOB_FAILURES.labels(name).inc()
            log.exception("job failed", job=name, failures=failures)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(0.25 * 2 ** min(failures, 10), 30.0)):
                    await stop.wait()
            continue
        if found and work.job not in _WHOLE:
            if work.loops > 1:
                bell.wake(work.job)
            await asyncio.sleep(0)
            continue
        await bell.wait(work.job, stop, work.seldom_s if is_first else None)
        await asyncio.sleep(work.rest_s)


async def _keep_time(clock: SharedClock, stop: asyncio.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_S):
                await stop.wait()
        try:
            await clock.sync()
        except Exception as error:  # the clock keeps its last offset
            log.warning("the database's clock was not read", error=repr(error))
