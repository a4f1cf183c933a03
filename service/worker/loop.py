"""The worker role: leases slices and keeps enough in flight that its engine never runs dry; drains at a stop."""

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, DrainedWorker
from service.errors import StartError
from service.metrics.counters import LOOP_LAG, SLICES
from service.metrics.engine import EngineMetrics
from service.metrics.gpu_health import GpuHealth
from service.objects.storage import Storage
from service.queue.announcements import Announcements
from service.queue.bell import Bell, Job
from service.queue.counts import Counts
from service.queue.leases import Leases, free_held
from service.queue.progress import Heartbeat, Progress
from service.queue.trust import address_proof, deployment_token
from service.settings import Settings
from service.worker.batch_engine import Engine
from service.worker.door import ENDS_S, Door, OnlineEngine
from service.worker.feed import Feed
from service.worker.following import Peers
from service.worker.room import Room
from service.worker.sharing import Sharing
from service.worker.slice_run import SliceRun

BEAT_S = 3.0
EVEN_S = 1.0  # between two looks at what to hand over
TAKE_MS = 1500  # a stop waits up to this long
LAG_EVERY_S = 0.25  # between two looks at how late the event loop is
REST_LOOK_S = 60.0  # between two looks at an idle engine
TRIAL_WAITS_S = 300.0  # for which a suspect slice waits for online requests
IN_FLIGHT = 4  # times the requests that an engine runs at once: what the scan needs for its blend
DRAIN_S = 4.0  # to write the remaining answers; container runtimes allow ten seconds for the whole stop
LATE_S = 1.0  # for tasks that have not ended after the drain
LOGGED = 64  # batches named in one log line
log = structlog.get_logger()


def _door_of(engine: OnlineEngine | None, settings: Settings, against: Callable[[], str | None]) -> Door | None:
    """Return the door for online requests, if the settings open one."""
    if engine is None or settings.online_host is None:
        return None
    token = deployment_token(settings)
    if token is None:
        log.warning("no online requests: set BATCHWEAVE_SECRET_KEY to the same value for all roles")
        return None
    return Door(engine, settings.served_models, token, settings.max_line_bytes, against)


class Worker:
    """Drives one engine: takes slices, runs them, renews their leases and sends heartbeats."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        redis: Redis,
        engine: Engine,
        settings: Settings,
        clock: Callable[[], float],
        in_flight_requests: int,
        metrics: EngineMetrics | None = None,
        machine: str = "",
        online: OnlineEngine | None = None,
        peers: Peers | None = None,
        gpus: GpuHealth | None = None,
        is_timed: bool = True,
    ) -> None:
        """Prepare a worker. `machine` describes what the engine runs on, for pages and the API.

        `online`: the engine, if it answers online requests too. `peers`: the other nodes of the engine, if it has any.
        `gpus`: how this machine's are. `is_timed`: whether the cost model describes the machine.
        """
        self._database = database
        self._storage = storage
        self._engine = engine
        self._settings = settings
        model, adapters = settings.served_model, settings.adapters
        self._leases = Leases(database, settings.worker_name, model, settings.lease_s, adapters)
        self._announcements = Announcements(redis, model, adapters)
        # In flight are several times what the engine runs at once.
        about = (settings.served_model, settings.worker_name, in_flight_requests // IN_FLIGHT)
        self._sharing = Sharing(redis, self._announcements, *about)
        self._progress = Progress(redis)
        # The heartbeat must expire before the lease does. Otherwise a dead worker would look like one that is only cut
        # off from the database.
        self._beat_s = min(BEAT_S, settings.lease_s / 8)
        self._heartbeat = Heartbeat(redis, 5 * self._beat_s)
        self._bell = Bell(redis, settings.poll_s)
        self._metrics = metrics or EngineMetrics(settings.served_model)
        self._room = Room(in_flight_requests, database, self._announcements, self._sharing, self._metrics, clock)
        self._feed = Feed()
        self._runs: set[SliceRun] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._machine = machine
        self._peers = peers
        self._gpus, self._is_timed = gpus, is_timed
        self._door = _door_of(online, settings, self._against_online)
        self._address = self._address_proof = ""
        self._is_stopping = False
        self._started_at = int(clock())
        self._is_drained = False
        self._was_busy, self._looked_at = True, -math.inf

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then give back the slices that are not finished."""
        await self._watch_drains()
        left = await free_held(self._database, self._settings.worker_name)
        if left:
            log.info("gave back the slices of an earlier process with this name", slices=left)
        await self._open_door()
        ended = asyncio.Event()
        others = [
            asyncio.create_task(self._repeat(self._renew, self._settings.lease_s / 3, ended)),
            asyncio.create_task(self._repeat(self._watch_batches, 1.0, ended)),
            asyncio.create_task(self._repeat(self._end_shares, 1.0, ended)),
            asyncio.create_task(self._repeat(self._watch_drains, 5.0, ended)),
            asyncio.create_task(self._repeat(self._beat, self._beat_s, ended)),
            asyncio.create_task(self._repeat(self._look, 3.0, ended)),
            asyncio.create_task(self._repeat(self._even_out, EVEN_S, ended)),
            asyncio.create_task(self._repeat(self._measure_lag, 0.0, ended)),
        ]
        try:
            await self._repeat(self._take_slice, 0.0, stop)
            self._is_stopping = True
            for run in self._runs:
                run.stop()
            closes = [] if self._door is None else [asyncio.create_task(self._door.close(DRAIN_S - ENDS_S))]
            others += closes
            if self._tasks or closes:
                await asyncio.wait([*self._tasks, *closes], timeout=min(self._settings.lease_s, DRAIN_S))
            # Tasks that can still end by themselves are not cancelled: a step cancelled in a transaction can keep its
            # lock, and before Python 3.12 `asyncio.wait_for`, which the Redis client uses, may lose the cancel.
            ended.set()
            await asyncio.wait(others, timeout=LATE_S)
        finally:
            unfinished = list(self._runs)
            late = [task for task in (*others, *self._tasks) if not task.done()]
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=LATE_S)
        with suppress(RedisError, OSError):
            await self._sharing.leave()
        with suppress(RedisError, OSError):
            await self._heartbeat.leave(self._settings.worker_name)
        await self._give_back(unfinished)

    async def _open_door(self) -> None:
        """Take online requests, if the settings say so. Raises StartError."""
        host, port = self._settings.online_host, self._settings.online_port
        if self._door is None or host is None:
            log.info("takes no online requests; BATCHWEAVE_ONLINE_HOST says where it would")
            return
        try:
            self._address = await self._door.open(host, port)
            about = (self._settings.worker_name, self._settings.served_model, self._address)
            self._address_proof = address_proof(self._door.token, *about)
        except OSError as error:
            message = f"BATCHWEAVE_ONLINE_HOST {host}, BATCHWEAVE_ONLINE_PORT {port}: {error}"
            raise StartError(f"{message}. Name an address of this machine and a free port.") from error
        log.info("takes online requests", address=self._address)

    def _against_online(self) -> str | None:
        """Return why the worker takes no online request now, or None."""
        if self._is_stopping:
            return "it stops"
        if self._is_drained:
            return "it is drained"
        # Such a slice has killed a worker, and would take the online requests with it.
        return "it tries a suspect slice" if any(run.lease.trial for run in self._runs) else None

    async def _give_back(self, runs: Sequence[SliceRun]) -> None:
        """Give back slices that did not end in time: other workers take them at once, and no death is counted."""
        with suppress(SQLAlchemyError, OSError, TimeoutError):
            async with asyncio.timeout(LATE_S):
                for run in runs:
                    await self._leases.give_back(run.lease, run.segments)

    async def _repeat(self, step: Callable[[], Any], pause_s: float, stop: asyncio.Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                await step()
                failures = 0
            except Exception:  # the boundary of the worker: Redis or SQL may be unavailable for a while
                failures += 1
                log.exception("worker step failed", step=step.__name__, failures=failures)
            pause = max(pause_s, min(0.1 * 2 ** min(failures, 10), 10.0) if failures else 0.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()

    async def _take_slice(self) -> None:
        """Start one more slice if the engine has room for it."""
        on_trial = any(run.lease.trial for run in self._runs)
        if self._is_drained or on_trial or not await self._room.is_left(self._runs):
            await asyncio.sleep(0.02)
            return
        mine = self._sharing.slices(self._runs)
        slice_id = await self._announcements.take(mine, self._sharing.slices_of_others, block_ms=TAKE_MS)
        if slice_id is None:
            await asyncio.sleep(0.02)
            return
        lease = await self._leases.claim(slice_id)
        if lease is None:
            await self._watch_drains()
        else:
            run = SliceRun(
                lease,
                self._database,
                self._storage,
                self._engine,
                self._settings,
                self._clock,
                self._state_progress,
                self._leases,
                self._feed,
            )
            self._runs.add(run)
            task = asyncio.create_task(self._run_slice(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._announcements.forget_taken(slice_id)
        await self._bell.ring(Job.RECONCILER)  # there is room for another announcement

    async def _run_slice(self, run: SliceRun) -> None:
        lease = run.lease
        structlog.contextvars.bind_contextvars(slice=lease.slice_id, epoch=lease.epoch)  # for this task and subtasks
        try:
            waits_since = time.monotonic()
            while lease.trial and self._has_others() and not run.stopping:  # they would die with it
                if self._door is not None and time.monotonic() - waits_since > TRIAL_WAITS_S:
                    self._door.end_all()  # one that is never read to its end would hold up the worker
                await asyncio.sleep(0.02)
            whole = await run.run()
            if whole:
                kept = await self._leases.finish(lease, run.counts, run.segments)
                await self._forget_progress(run)
            else:
                kept = await self._leases.give_back(lease, run.segments)
            await self._bell.ring(Job.FINALIZER if whole else Job.RECONCILER)
            self._let_go("lost" if not kept else "finished" if whole else "given back")
            log.info("slice", batches=sorted(run.batch_ids)[:LOGGED], finished=whole, lease_kept=kept)
        except Exception:  # the boundary of the worker: the slice becomes ready again, and the log says why
            self._let_go("failed")
            log.exception("slice failed")
            await asyncio.sleep(1.0)  # a slice that always fails must not spin
            with suppress(SQLAlchemyError):  # otherwise the lease expires by itself
                await self._leases.give_back(lease, run.segments)
        finally:
            self._runs.discard(run)
            self._sharing.let_go(run)

    async def _even_out(self) -> None:
        if self._is_drained or self._is_stopping or any(run.lease.trial for run in self._runs):
            await self._sharing.leave()
        elif await self._sharing.even_out(self._runs):
            await self._bell.ring(Job.RECONCILER)

    def _has_others(self) -> bool:
        """Return whether the engine runs other slices or online requests."""
        return len(self._runs) > 1 or (self._door is not None and self._door.in_flight > 0)

    def _let_go(self, outcome: str) -> None:
        SLICES.labels(self._settings.served_model, outcome).inc()

    async def _state_progress(self, slice_id: int, counts: dict[str, Counts]) -> None:
        try:
            await self._progress.state(slice_id, counts)
        except (RedisError, OSError) as error:
            log.warning("progress not published", slice=slice_id, error=repr(error))

    async def _forget_progress(self, run: SliceRun) -> None:
        try:
            await self._progress.forget(run.lease.slice_id, run.batch_ids)
        except (RedisError, OSError) as error:
            log.warning("progress not removed", slice=run.lease.slice_id, error=repr(error))

    async def _renew(self) -> None:
        runs = list(self._runs)
        kept = await self._leases.renew(run.lease for run in runs)
        for run in runs:
            if run.lease not in kept and run in self._runs and not run.stopping:
                log.warning("lease lost", slice=run.lease.slice_id, epoch=run.lease.epoch)
                run.stop()

    async def _watch_batches(self) -> None:
        """Stop the requests of batches that were cancelled or have expired."""
        running = {batch_id for run in self._runs for batch_id in run.batch_ids}
        if not running:
            return
        async with self._database.read() as session:
            ended = (
                await session.scalars(
                    select(Batch.id).where(Batch.id.in_(running), Batch.status != BatchStatus.IN_PROGRESS)
                )
            ).all()
        for run in list(self._runs):
            for batch_id in run.batch_ids.intersection(ended):
                run.stop_batch(batch_id)

    async def _end_shares(self) -> None:
        """Let batches go whose requests of a slice are all answered, while it runs those of others."""
        for run in list(self._runs):
            done = {} if run.stopping else run.answered_batches
            if not done:
                continue
            if await self._leases.finish_shares(run.lease, done):
                run.let_go(done)
                await self._bell.ring(Job.FINALIZER)
            elif run in self._runs:
                run.stop()

    async def _watch_drains(self) -> None:
        async with self._database.read() as session:
            drained = await session.get(DrainedWorker, self._settings.worker_name) is not None
        if drained != self._is_drained:
            log.info("worker drained: it takes no new slices" if drained else "worker resumed: it takes slices again")
        self._is_drained = drained

    async def _look(self) -> None:
        """Read the engine's state for the metrics; an idle engine is asked less often.

        This is a loop of its own, because an engine in a long step answers late.
        """
        is_busy = bool(self._runs) or (self._door is not None and self._door.in_flight > 0)
        if is_busy or self._was_busy or time.monotonic() - self._looked_at > REST_LOOK_S:
            self._was_busy, self._looked_at = is_busy, time.monotonic()
            self._metrics.take(await self._engine.scheduler_states(), time.monotonic())

    async def _measure_lag(self) -> None:
        due = time.perf_counter() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        LOOP_LAG.observe(max(0.0, time.perf_counter() - due))

    async def _beat(self) -> None:
        state = {
            "engine": self._metrics.summary,
            "name": self._settings.worker_name,
            "model": self._settings.served_model,
            "models": self._settings.served_models,
            "slices": len(self._runs),
            "drained": self._is_drained,
            "requests": sum(run.remaining for run in self._runs),
            "host": socket.gethostname(),
            "followers": [] if self._peers is None else self._peers.hosts,
            "pid": os.getpid(),
            "machine": self._machine,
            "is_timed": self._is_timed,
            "gpus": [] if self._gpus is None else self._gpus.latest,
            "online": self._address,
            "online_proof": self._address_proof,
            "online_requests": None if self._door is None else self._door.in_flight,
            "started_at": self._started_at,
            "seen_at": int(self._clock()),
            "step_age_s": round(self._engine.step_age_s, 1),
            **self._metrics.rates(time.monotonic()),
        }
        await self._heartbeat.beat(self._settings.worker_name, state)
