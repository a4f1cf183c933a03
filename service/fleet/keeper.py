"""Keeps as many engines of each model as its batches need: starts, drains and ends them on a cluster.

SQL and Redis say what there is to do and what workers do, and the cluster says which engines there are. What this
process remembers beside that only delays a decision, so the next fleet goes on where this one ends.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from service.db.drains import drain, drained_workers, resume
from service.db.sessions import Database
from service.fleet.demand import Speeds, jobs_by_model
from service.fleet.engines import Cluster, NewEngine, NotStarted, engine_id, model_of
from service.fleet.lease import FleetLease
from service.fleet.members import Member, Members, Phase
from service.fleet.node import STOP_S, WORKER
from service.fleet.placement import make_room, most_engines, place
from service.fleet.spec import FleetSpec, ModelSpec
from service.fleet.wanted import Demand, Job, wanted
from service.metrics.counters import FLEET_ENGINES, FLEET_WANTED
from service.metrics.history import History
from service.queue.progress import TTL_S, Heartbeat

LOOK_S = 3.0
MOST_FAILURES = 5  # exits in a row, after which an engine is taken away for a while
FIRST_REST_S, LONGEST_REST_S = 60.0, 1800.0
LOOKS_TO_TAKE = 2  # in a row must agree before an engine is taken away
MOST_STARTS = 8  # at once
ABANDONED_S = 60.0  # without a worker's name: the fleet that started it has died
KILLED_S = STOP_S + 15.0
log = structlog.get_logger()


@dataclass(slots=True)
class Rest:
    """How long no engine of a model is started, after some have failed."""

    failures: int = 0
    until: float = 0.0

    def begin(self) -> float:
        """Count a failure, and return the seconds to rest."""
        self.failures += 1
        rest_s = min(FIRST_REST_S * 2 ** (self.failures - 1), LONGEST_REST_S)
        self.until = time.monotonic() + rest_s
        return rest_s

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.until


@dataclass
class Keeper:
    """One fleet. `owner`: its name for the lease; `command`: what runs a worker."""

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
        self._speeds, self._seen = Speeds(), Members()
        self._starting: dict[str, tuple[NewEngine, asyncio.Task[None]]] = {}  # by engine
        self._rests: dict[str, Rest] = {}
        self._too_many: Counter[str] = Counter()  # by model: looks in a row in which it had too many engines
        self._ended: dict[str, float] = {}  # workers that were ended, and when: a heartbeat outlives its worker
        self.keeps: bool | None = None  # whether it holds the lease; None before the first look

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the fleet until `stop` is set. Its engines stay then: they work on, and the next fleet finds them."""
        try:
            while not stop.is_set():
                await self._look_again()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.look_s):
                        await stop.wait()
        finally:
            await self._leave()

    async def end_all(self, stop: asyncio.Event) -> None:
        """Drain and end all engines of the fleet, or as many as have ended when `stop` is set."""
        self.spec = self.spec.model_copy(update={"models": []})
        try:
            while not stop.is_set():
                if await self._look_again() and self.keeps and not self.members:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.look_s):
                        await stop.wait()
        finally:
            await self._leave()

    async def look(self) -> None:
        """Look at everything once, and change what must change. Raises what SQL and Redis raise."""
        if not await self._take_turn():
            return
        engines, machines = await asyncio.to_thread(lambda: (self.cluster.engines(), self.cluster.machines()))
        alive = {str(state["name"]): state for state in await self._heartbeat.alive()}
        self._ended = {name: at for name, at in self._ended.items() if time.monotonic() - at < 2 * TTL_S}
        jobs = await jobs_by_model(self.database)
        async with self.database.read() as session:
            drained = await drained_workers(session)
        self.members = self._seen.look(engines, alive, drained)
        serving = Counter(str(state["model"]) for state in alive.values())
        self._speeds.look(await self._history.model_paces(), serving, time.monotonic())
        if not self._lease.held:  # reading took too long
            return
        ours = {each.engine.worker for each in self.members} | self._ended.keys()
        others = Counter(str(state["model"]) for name, state in alive.items() if name not in ours)
        await self._end_gone()
        self.targets = self._decide(jobs, others, machines)
        self._show()
        await self._take_away()
        await self._start_missing(machines)

    async def _look_again(self) -> bool:
        try:
            await self.look()
        except (SQLAlchemyError, RedisError, OSError) as error:
            log.warning("cannot look; the engines stay as they are", error=repr(error))
            return False
        return True

    async def _leave(self) -> None:
        await asyncio.gather(*(task for _, task in self._starting.values()))
        with suppress(SQLAlchemyError, OSError):
            await self._lease.let_go()

    async def _take_turn(self) -> bool:
        keeps = await self._lease.keep()
        if keeps and not self.keeps:
            await asyncio.to_thread(self.cluster.tidy)
            log.info("keeps the engines", models=[each.name for each in self.spec.models])
        elif not keeps and self.keeps is not False:
            log.info("waits: another fleet keeps the engines of this database")
        self.keeps = keeps
        return keeps

    async def _end_gone(self) -> None:
        """End engines that have stopped, or lost a machine, or fail again and again; stop those that are drained."""
        for member in [each for each in self.members if each.engine.id not in self._starting]:
            engine, name = member.engine, member.engine.id
            has_failed = member.phase == Phase.STARTING and engine.failures >= MOST_FAILURES
            if engine.lost:
                await self._end(member, "lost a machine")
            elif member.asked_s is not None and (engine.ended or member.asked_s > KILLED_S):
                await self._end(member, "has ended" if engine.ended else "did not stop in time")
            elif not engine.worker and member.for_s > ABANDONED_S:
                await self._end(member, "was not started whole")
            elif has_failed:
                rest_s = self._rests.setdefault(engine.model, Rest()).begin()
                exits = {node.host: node.exit for node in engine.nodes}
                log.error("an engine does not start; see its log in Ray's", engine=name, exits=exits, rests_s=rest_s)
                await self._end(member, "does not start")
            elif member.phase == Phase.LEAVING and member.asked_s is None:
                if not member.holds or member.for_s > self.spec.drain_s:
                    await self._stop(member)
            elif member.phase in (Phase.BUSY, Phase.IDLE) and engine.model in self._rests:
                del self._rests[engine.model]

    def _decide(
        self, jobs: Mapping[str, Sequence[Job]], others: Mapping[str, int], machines: Mapping[str, int]
    ) -> dict[str, int]:
        demands: dict[str, Demand] = {}
        for spec in self.spec.models:
            work = self._speeds.real(spec.name, jobs.get(spec.name, ()))
            demands[spec.name] = self._demand(spec, work, others.get(spec.name, 0), machines)
        gpus = sum(machines.values())
        return wanted(demands, gpus, self.clock(), self.spec.seconds_per_engine, self.spec.switch_s)

    def _demand(self, spec: ModelSpec, jobs: tuple[Job, ...], others: int, machines: Mapping[str, int]) -> Demand:
        staying = self._staying(spec)
        # One that starts will have work, if there is some.
        busy = [each for each in staying if each.phase == Phase.BUSY or (each.phase == Phase.STARTING and jobs)]
        idle = [each for each in staying if each not in busy and each.for_s < self.spec.idle_s]
        unseen = len(self._unseen(spec))
        most = min(spec.max, most_engines(machines, spec.gpus, spec.nodes))
        rests = spec.name in self._rests and self._rests[spec.name].lasts
        return Demand(
            gpus=spec.all_gpus,
            least=spec.min,
            most=min(most, len(staying) + unseen) if rests else most,
            starts_s=self._seen.starts_s.get(spec.name, spec.start_s),
            jobs=jobs,
            others=others,
            locked=sum(each.age_s < self.spec.switch_s for each in busy) + unseen,
            busy=len(busy) + unseen,
            idle=len(idle),
        )

    def _staying(self, spec: ModelSpec) -> list[Member]:
        mine = [each for each in self.members if each.engine.model == spec.name and each.phase != Phase.LEAVING]
        return [each for each in mine if each.engine.digest == spec.digest]

    def _unseen(self, spec: ModelSpec) -> list[str]:
        """Return the model's engines that are starting and that the cluster did not show yet."""
        seen = {each.engine.id for each in self.members}
        return [each for each in self._starting if model_of(each) == spec.name and each not in seen]

    def _show(self) -> None:
        there = Counter((each.engine.model, each.phase) for each in self.members)
        for spec in self.spec.models:
            FLEET_WANTED.labels(spec.name).set(self.targets[spec.name])
            for phase in Phase:
                FLEET_ENGINES.labels(spec.name, phase).set(there[spec.name, phase])

    async def _take_away(self) -> None:
        for member in list(self.members):
            spec = self.spec.by_name.get(member.engine.model)
            is_outdated = spec is None or (member.engine.digest and member.engine.digest != spec.digest)
            if is_outdated and member.phase != Phase.LEAVING and member.engine.id not in self._starting:
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
        log.info("takes an engine away", engine=member.engine.id, why=why, phase=str(member.phase))
        self.members[self.members.index(member)] = replace(member, phase=Phase.LEAVING)
        if member.holds:
            async with self.database.write() as session:
                await drain(session, member.engine.worker, self.clock())
        else:
            await self._stop(member)

    async def _stop(self, member: Member) -> None:
        self._seen.asked_to_stop(member.engine.id)
        await asyncio.to_thread(self.cluster.stop, member.engine.id)

    async def _end(self, member: Member, why: str) -> None:
        log.info("ends an engine", engine=member.engine.id, why=why)
        await asyncio.to_thread(self.cluster.end, member.engine.id)
        async with self.database.write() as session:
            await resume(session, member.engine.worker)  # or the next worker of this name would take nothing
        self._ended[member.engine.worker] = time.monotonic()
        self.members.remove(member)

    async def _start_missing(self, machines: Mapping[str, int]) -> None:
        """Start engines, the largest first, or make room for them where there is too little on one machine."""
        free = Counter(machines)
        for member in self.members:
            free.subtract(dict(member.engine.places))
        seen = {each.engine.id for each in self.members}
        for engine, (new, _) in self._starting.items():
            if engine not in seen:
                free.subtract(dict.fromkeys(new.machines, new.gpus))
        for spec in sorted(self.spec.models, key=lambda each: (-each.gpus, -each.nodes)):
            missing = self.targets[spec.name] - len(self._staying(spec)) - len(self._unseen(spec))
            while missing > 0 and len(self._starting) < MOST_STARTS and self._lease.held:
                places = place(free, spec.gpus, spec.nodes)
                if places is None:
                    await self._make_room(spec, free)
                    break
                self._start(spec, places)
                free.subtract(dict.fromkeys(places, spec.gpus))
                missing -= 1

    async def _make_room(self, spec: ModelSpec, free: Mapping[str, int]) -> None:
        """Take away engines that stand in the way of a larger one, which then start elsewhere if there is room."""
        soon, movable = Counter(free), defaultdict[str, list[tuple[int, str]]](list)
        for member in self.members:
            for machine, gpus in member.engine.places:
                if member.phase == Phase.LEAVING:
                    soon[machine] += gpus
                elif gpus < spec.gpus and (member.phase == Phase.IDLE or member.age_s > self.spec.switch_s):
                    movable[machine].append((gpus, member.engine.id))
        for engine in make_room(soon, movable, spec.gpus, spec.nodes) or ():
            member = next(each for each in self.members if each.engine.id == engine)
            await self._drain(member, f"makes room for {spec.name} on its machine")

    def _start(self, spec: ModelSpec, machines: list[str]) -> None:
        taken = {*self._starting, *(each.engine.id for each in self.members)}
        number = next(each for each in count() if engine_id(spec.name, each) not in taken)
        new = NewEngine(
            id=engine_id(spec.name, number),
            digest=spec.digest,
            gpus=spec.gpus,
            machines=machines,
            name=f"{spec.slug}-{number}",
            variables=spec.variables,
            command=self.command,
            online=self.spec.online,
        )
        self._starting[new.id] = (new, asyncio.create_task(self._start_one(spec.name, new)))

    async def _start_one(self, model: str, new: NewEngine) -> None:
        log.info("starts an engine", engine=new.id, gpus=new.gpus, machines=len(new.machines))
        try:
            await asyncio.to_thread(self.cluster.start, new)
        except NotStarted as error:
            rest_s = self._rests.setdefault(model, Rest()).begin()
            log.error("an engine was not started", engine=new.id, why=str(error), rests_s=rest_s)
        finally:
            del self._starting[new.id]


def _goes_first(member: Member) -> tuple[int, float]:
    """Sort the engines to take away: idle ones first, the longest idle first; then the youngest."""
    order = (Phase.IDLE, Phase.STARTING, Phase.BUSY).index(member.phase)
    return order, -member.for_s if member.phase == Phase.IDLE else member.age_s
