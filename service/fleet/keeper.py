"""Keeps as many engines of each model as its batches need: starts, drains and ends them on a cluster.

SQL and Redis say what there is to do and what workers do, and the cluster says which engines there are. What this
process remembers beside that only delays a decision, so the next fleet continues where this one ends.
"""

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from service.db.drains import drain, drained_workers, resume
from service.db.sessions import Database
from service.fleet.demand import Speeds, work_by_model
from service.fleet.engines import Cluster, Machine, NewEngine, NotStarted, engine_id, model_of
from service.fleet.lease import FleetLease
from service.fleet.members import Member, Members, Phase
from service.fleet.node import STOP_S, WORKER
from service.fleet.placement import make_room, most_engines, place
from service.fleet.rests import Rests
from service.fleet.spec import FleetSpec, ModelSpec
from service.fleet.wanted import Demand, Remainder, wanted
from service.metrics.counters import FLEET_ENGINES, FLEET_WANTED
from service.metrics.history import History
from service.queue.progress import STALLED_S, TTL_S, Heartbeat

LOOK_S = 3.0
CALL_S = 60.0  # for a call of the cluster
LEAVE_S = 5.0  # for a look to end once the fleet is to stop
TIDY_S = 300.0
MOST_FAILURES = 5  # exits of a worker since it was last ready, after which its engine is taken away
LONGEST_START_S, STARTS = 1800.0, 10.0  # an engine that takes longer, and so many times as long as it should, hangs
LOOKS_TO_TAKE = 2  # in a row must agree before an engine is taken away
MOST_STARTS = 8  # at once
HALF_S = 150.0  # an engine that is started only in part is so because the fleet that was starting it has died
KILLED_S = STOP_S + 15.0
log = structlog.get_logger()
T = TypeVar("T")


@dataclass
class Keeper:
    """Keeps one fleet. `owner`: its name for the lease; `command`: what runs a worker."""

    database: Database
    redis: Redis
    cluster: Cluster
    spec: FleetSpec
    clock: Callable[[], float]
    owner: str
    command: Sequence[str] = WORKER
    look_s: float = LOOK_S
    members: list[Member] = field(default_factory=list[Member])  # as of the last look
    targets: dict[str, int] = field(default_factory=dict[str, int])  # engines by model, as of the last look

    def __post_init__(self) -> None:
        self._lease = FleetLease(self.database, self.owner)
        self._heartbeat, self._history = Heartbeat(self.redis), History(self.redis)
        self._speeds, self._seen, self._rests = Speeds(), Members(), Rests()
        self._starting: dict[str, tuple[NewEngine, asyncio.Task[None]]] = {}  # by engine
        self._too_many: Counter[str] = Counter()  # by model: looks in a row in which it had too many engines
        self._ended: dict[str, float] = {}  # workers that were ended, and when: a heartbeat outlives its worker
        self._tidied_at = float("-inf")
        # Calls of a cluster whose head is gone may never return. They must not take the threads of anything else.
        self._callers, self._starters = ThreadPoolExecutor(2), ThreadPoolExecutor(MOST_STARTS)
        self.holds_lease: bool | None = None  # None before the first look

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the fleet until `stop` is set. Its engines stay then: they work on, and the next fleet finds them."""
        await self._look_until(stop, lambda: False)

    async def end_all(self, stop: asyncio.Event) -> None:
        """Drain and end all engines of the fleet, or as many as have ended when `stop` is set."""
        self.spec = self.spec.model_copy(update={"models": []})
        await self._look_until(stop, lambda: self.holds_lease is True and not self.members)

    async def _look_until(self, stop: asyncio.Event, is_done: Callable[[], bool]) -> None:
        try:
            while not stop.is_set():
                try:
                    await self._look_unless(stop)
                    if is_done():
                        return
                except (SQLAlchemyError, RedisError, OSError) as error:
                    log.warning("this look ends early; the rest stays as it is", error=repr(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.look_s):
                        await stop.wait()
        finally:
            await self._leave()

    async def _look_unless(self, stop: asyncio.Event) -> None:
        """Look, but end the look soon after `stop` is set: the cluster may not answer for a minute."""
        look, stops = asyncio.create_task(self.look()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([look, stops], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([look], timeout=LEAVE_S)
            if look.done():
                look.result()
        finally:
            stops.cancel()
            look.cancel()  # if it is not done
            await asyncio.wait([look])

    async def look(self) -> None:
        """Look at everything once, and change what must change. Raises OSError and what SQL and Redis raise."""
        if not await self._has_lease():
            return
        if time.monotonic() - self._tidied_at > TIDY_S:
            starting = set(self._starting)
            await self._call(lambda: self.cluster.tidy(starting))
            self._tidied_at = time.monotonic()
        engines, machines = await self._call(lambda: (self.cluster.engines(), self.cluster.machines()))
        alive = {str(state["name"]): state for state in await self._heartbeat.alive()}
        self._ended = {name: at for name, at in self._ended.items() if time.monotonic() - at < 2 * TTL_S}
        async with self.database.read() as session:
            drained = await drained_workers(session)
        self.members = self._seen.look(engines, alive, drained)
        await self._end_gone()
        usable, free = self._room(machines)
        self.targets = await self._decide(alive, drained, usable)
        self._show()
        await self._take_away()
        await self._start_missing(free)

    async def _call(self, call: Callable[[], T]) -> T:
        """Call the cluster in a thread. Raises TimeoutError, which is an OSError."""
        async with asyncio.timeout(CALL_S):
            return await asyncio.get_running_loop().run_in_executor(self._callers, call)

    async def _leave(self) -> None:
        """Keep the lease until what is being started has started, and let it go."""
        until = time.monotonic() + HALF_S
        while self._starting and time.monotonic() < until:
            with suppress(SQLAlchemyError, OSError):
                await self._lease.renew()
            if starting := [task for _, task in self._starting.values()]:  # the last one may have started meanwhile
                await asyncio.wait(starting, timeout=LOOK_S)
        with suppress(SQLAlchemyError, OSError):
            await self._lease.let_go()
        for threads in (self._callers, self._starters):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _has_lease(self) -> bool:
        holds = await self._lease.renew()
        if holds and not self.holds_lease:
            self._tidied_at = float("-inf")
            log.info("keeps the engines", models=[each.name for each in self.spec.models])
        elif not holds and self.holds_lease is not False:
            log.info("waits: another fleet keeps the engines of this database")
            FLEET_ENGINES.clear()
            FLEET_WANTED.clear()
        self.holds_lease = holds
        return holds

    async def _end_gone(self) -> None:
        """End engines that have ended, lost a machine, or fail again and again; stop those that are drained."""
        for member in [each for each in self.members if each.engine.id not in self._starting]:
            engine = member.engine
            machines = [machine for machine, _ in engine.gpus_on]
            if (why := _why_gone(member)) is not None:
                await self._end(member, why)
            elif self._fails(member):
                rest_s = self._rests.begin(engine.model, machines)
                about = {"engine": engine.id, "machines": machines, "rests_s": rest_s}
                exits = {node.host: node.exit for node in engine.nodes}
                log.error("an engine does not start; Ray's log of its actor says why", exits=exits, **about)
                await self._end(member, "does not start")
            elif member.phase == Phase.LEAVING:
                # One that was asked is asked again, in case it was not heard.
                if member.asked_s is not None or not member.holds or member.for_s > self.spec.drain_s:
                    await self._stop(member)
            elif member.phase != Phase.STARTING:
                self._rests.end(engine.model, machines, member.age_s)

    def _fails(self, member: Member) -> bool:
        spec = self.spec.by_name.get(member.engine.model)
        longest_s = max(LONGEST_START_S, STARTS * (spec.start_s if spec else 0.0))
        return member.failures >= MOST_FAILURES or (member.phase == Phase.STARTING and member.for_s > longest_s)

    def _room(self, machines: Mapping[str, Machine]) -> tuple[dict[str, int], Counter[str]]:
        """Return by machine the GPUs that this fleet may use, and those of them that are free."""
        ours = Counter[str]()
        for member in self.members:
            for machine, gpus in member.engine.gpus_on:
                ours[machine] += gpus
        seen = {each.engine.id for each in self.members}
        for engine, (new, _) in self._starting.items():
            if engine not in seen:
                ours.update(dict.fromkeys(new.machines, new.gpus))
        usable = {name: each.gpus - max(0, each.gpus - each.free - ours[name]) for name, each in machines.items()}
        # The cluster may show a GPU as taken a little later, or for a little longer.
        free = {name: max(0, min(each.free, usable[name] - ours[name])) for name, each in machines.items()}
        return usable, Counter(free)

    async def _decide(
        self, alive: Mapping[str, Mapping[str, Any]], drained: set[str], usable: Mapping[str, int]
    ) -> dict[str, int]:
        work = await work_by_model(self.database)
        ours = {each.engine.worker for each in self.members} | self._ended.keys()
        takes = [
            state
            for name, state in alive.items()
            if name not in drained and float(state.get("step_age_s") or 0.0) <= STALLED_S
        ]
        others = Counter(str(state["model"]) for state in takes if state["name"] not in ours)
        everyone = Counter(str(state["model"]) for state in alive.values())
        busy = Counter(str(state["model"]) for state in takes if state["slices"])
        paces = await self._history.model_paces()
        all_busy = {model: count for model, count in everyone.items() if busy[model] == count}
        self._speeds.look(paces, all_busy, time.monotonic())
        demands = {
            spec.name: self._demand(spec, self._speeds.real(spec.name, work.get(spec.name, ())), others, usable)
            for spec in self.spec.models
        }
        gpus = sum(usable.values())
        return wanted(demands, gpus, self.clock(), self.spec.seconds_per_engine, self.spec.switch_s)

    def _demand(
        self, spec: ModelSpec, remainders: tuple[Remainder, ...], others: Mapping[str, int], usable: Mapping[str, int]
    ) -> Demand:
        staying, unseen = self._staying(spec), len(self._unseen(spec))
        # One that starts will have work, if there is some.
        busy = [each for each in staying if each.phase == Phase.BUSY or (each.phase == Phase.STARTING and remainders)]
        idle = [each for each in staying if each not in busy and each.for_s < self.spec.idle_s]
        resting = self._rests.machines(spec.name)
        fit = most_engines({name: gpus for name, gpus in usable.items() if name not in resting}, spec.gpus, spec.nodes)
        return Demand(
            gpus=spec.all_gpus,
            least=spec.min,
            most=min(spec.max, max(fit, len(staying) + unseen)),
            starts_s=self._seen.starts_s.get(spec.name, spec.start_s),
            remainders=remainders,
            others=others.get(spec.name, 0),
            locked=sum(each.age_s < self.spec.switch_s for each in busy) + unseen,
            busy=len(busy) + unseen,
            idle=len(idle),
        )

    def _staying(self, spec: ModelSpec) -> list[Member]:
        mine = [each for each in self.members if each.engine.model == spec.name and each.phase != Phase.LEAVING]
        return [each for each in mine if not self._is_outdated(each)]

    def _unseen(self, spec: ModelSpec) -> list[str]:
        """Return the model's engines that are starting and that the cluster did not show yet."""
        seen = {each.engine.id for each in self.members}
        return [each for each in self._starting if model_of(each) == spec.name and each not in seen]

    def _is_outdated(self, member: Member) -> bool:
        spec = self.spec.by_name.get(member.engine.model)
        if spec is None:
            return True
        return bool(member.engine.digest) and member.engine.digest != self.spec.digest(spec)

    def _show(self) -> None:
        there = Counter((each.engine.model, each.phase) for each in self.members)
        for spec in self.spec.models:
            FLEET_WANTED.labels(spec.name).set(self.targets[spec.name])
            for phase in Phase:
                FLEET_ENGINES.labels(spec.name, phase).set(there[spec.name, phase])

    async def _take_away(self) -> None:
        for member in list(self.members):
            is_here = member.phase != Phase.LEAVING and member.engine.id not in self._starting
            if is_here and self._is_outdated(member):
                await self._drain(member, "not in fleet.yaml any more, or started with other settings")
        for spec in self.spec.models:
            staying = self._staying(spec)
            too_many = len(staying) + len(self._unseen(spec)) - self.targets[spec.name]
            self._too_many[spec.name] = self._too_many[spec.name] + 1 if too_many > 0 else 0
            if self._too_many[spec.name] >= LOOKS_TO_TAKE:
                can_go = [each for each in staying if each.engine.id not in self._starting]
                for member in sorted(can_go, key=_goes_first)[:too_many]:
                    await self._drain(member, "no work for it" if member.phase == Phase.IDLE else "for another model")

    async def _drain(self, member: Member, why: str) -> None:
        self._lease.check()
        log.info("takes an engine away", engine=member.engine.id, why=why, phase=str(member.phase))
        if member.holds:
            async with self.database.write() as session:
                await drain(session, member.engine.worker, self.clock())
        else:
            await self._stop(member)
        self.members[self.members.index(member)] = replace(member, phase=Phase.LEAVING)

    async def _stop(self, member: Member) -> None:
        self._lease.check()
        await self._call(lambda: self.cluster.stop(member.engine.id))
        self._seen.asked_to_stop(member.engine.id)

    async def _end(self, member: Member, why: str) -> None:
        self._lease.check()
        log.info("ends an engine", engine=member.engine.id, why=why)
        async with self.database.write() as session:
            await resume(session, member.engine.worker)  # no other worker will have this name
        await self._call(lambda: self.cluster.end(member.engine.id))
        self._ended[member.engine.worker] = time.monotonic()
        self.members.remove(member)

    async def _start_missing(self, free: Counter[str]) -> None:
        """Start engines, the largest first, or make room for them where there is too little on one machine."""
        rests = {spec.name: self._rests.machines(spec.name) for spec in self.spec.models}
        # Of equal ones, those that may not start everywhere choose first.
        for spec in sorted(self.spec.models, key=lambda each: (-each.gpus, -each.nodes, -len(rests[each.name]))):
            missing = self.targets[spec.name] - len(self._staying(spec)) - len(self._unseen(spec))
            resting = rests[spec.name]
            while missing > 0 and len(self._starting) < MOST_STARTS:
                allowed = {name: gpus for name, gpus in free.items() if name not in resting}
                machines = place(allowed, spec.gpus, spec.nodes)
                if machines is None:
                    for machine in await self._make_room(spec, free, resting):
                        free[machine] = 0  # for this engine, once the others are gone
                    break
                self._start(spec, machines)
                free.subtract(dict.fromkeys(machines, spec.gpus))
                missing -= 1

    async def _make_room(self, spec: ModelSpec, free: Counter[str], resting: set[str]) -> list[str]:
        """Take away engines that stand in the way of this one, which then start elsewhere if there is room.

        They are smaller, or have room on one of the `resting` machines, where this one may not start now. Returns the
        machines that will have room.
        """
        soon, movable = Counter(free), defaultdict[str, list[tuple[int, str]]](list)
        for member in self.members:
            for machine, gpus in member.engine.gpus_on:
                if member.phase == Phase.LEAVING:
                    soon[machine] += gpus
                elif member.phase == Phase.IDLE or member.age_s > self.spec.switch_s:
                    elsewhere = [free[each] for each in resting - self._rests.machines(member.engine.model)]
                    has_room = len(member.engine.gpus_on) == 1 and max(elsewhere, default=0) >= gpus
                    if gpus < spec.gpus or has_room:
                        movable[machine].append((gpus, member.engine.id))
        allowed = {name: gpus for name, gpus in soon.items() if name not in resting}
        room = make_room(allowed, movable, spec.gpus, spec.nodes)
        if room is None:
            return []
        for member in [each for each in self.members if each.engine.id in room.engines]:
            await self._drain(member, f"makes room for {spec.name} on its machine")
        return room.machines

    def _start(self, spec: ModelSpec, machines: list[str]) -> None:
        self._lease.check()
        token = secrets.token_hex(4)
        new = NewEngine(
            id=engine_id(spec.name, token),
            digest=self.spec.digest(spec),
            gpus=spec.gpus,
            machines=machines,
            name=f"{spec.slug}-{token}",
            variables=spec.variables,
            command=self.command,
            online=self.spec.online,
        )
        log.info("starts an engine", engine=new.id, gpus=new.gpus, machines=len(new.machines))
        self._seen.started(new)
        started = asyncio.get_running_loop().run_in_executor(self._starters, self.cluster.start, new)
        self._starting[new.id] = (new, asyncio.create_task(self._wait_for_start(new, started)))

    async def _wait_for_start(self, new: NewEngine, started: Awaitable[None]) -> None:
        try:
            await started
        except NotStarted as error:
            rest_s = self._rests.begin(model_of(new.id), new.machines) if error.blame else 0.0
            log.error("an engine was not started", engine=new.id, why=str(error), rests_s=rest_s)
        except OSError as error:  # what is left of it is tidied later
            log.error("an engine was not started", engine=new.id, why=repr(error))
        finally:
            del self._starting[new.id]


def _why_gone(member: Member) -> str | None:
    """Return why nothing of this engine can be used any more; None if it can."""
    engine = member.engine
    if engine.lost:
        return "lost a machine"
    if engine.ended:
        return "has ended"
    if member.asked_s is not None and member.asked_s > KILLED_S:
        return "did not stop in time"
    if engine.nodes and engine.is_half and member.age_s > HALF_S:
        return "was not started whole"
    return None


def _goes_first(member: Member) -> tuple[int, float]:
    """Sort the engines to take away: idle ones first, the longest idle first; then the youngest."""
    order = (Phase.IDLE, Phase.STARTING, Phase.BUSY).index(member.phase)
    return order, -member.for_s if member.phase == Phase.IDLE else member.age_s
