"""What a fleet does when engines, machines, other workers and leases are not what they should be."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import select, update

from service.db.clock import now_s
from service.db.drains import drain, drained_workers
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, FleetOwner
from service.fleet import keeper as keeper_module
from service.fleet.engines import Engine, Machine, NewEngine, NotStarted, Unreachable, model_of
from service.fleet.keeper import Keeper
from service.fleet.lease import namespace_of
from service.fleet.members import Phase
from service.fleet.node import NodeState
from service.fleet.spec import FleetSpec
from service.queue.progress import Heartbeat
from tests.conftest import Clock

FAR = 24 * 3600


@dataclass
class ScriptedCluster:
    """Stands in for Ray where the real one cannot be made to fail at a chosen moment."""

    gpus: dict[str, int]
    there: dict[str, Engine] = field(default_factory=dict[str, Engine])
    broken: set[str] = field(default_factory=set[str])  # machines on which nothing starts
    away: bool = False
    silent: bool = False  # whether the engines' machines do not answer, and never did
    started: list[NewEngine] = field(default_factory=list[NewEngine])
    stopped: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])

    def tidy(self, starting: Collection[str]) -> None:
        self._check()

    def machines(self) -> dict[str, Machine]:
        self._check()
        taken = dict.fromkeys(self.gpus, 0)
        for engine in self.there.values():
            for machine, gpus in engine.gpus_on:
                taken[machine] += gpus
        return {machine: Machine(gpus, gpus - taken[machine]) for machine, gpus in self.gpus.items()}

    def engines(self) -> list[Engine]:
        self._check()
        return [Engine(each.id) if self.silent else each for each in self.there.values()]

    def start(self, new: NewEngine) -> None:
        self.started.append(new)
        if self.broken & set(new.machines):
            raise NotStarted("its disk is full")
        nodes = [
            NodeState(rank, len(new.machines), new.gpus, new.digest, new.name, machine, machine, pid=1)
            for rank, machine in enumerate(new.machines)
        ]
        self.there[new.id] = Engine(new.id, nodes)

    def stop(self, engine: str) -> None:
        self.stopped.append(engine)

    def end(self, engine: str) -> None:
        self.ended.append(engine)
        self.there.pop(engine, None)

    def change(self, engine: str, **changes: Any) -> None:
        found = self.there[engine]
        self.there[engine] = Engine(engine, [replace(node, **changes) for node in found.nodes])

    def _check(self) -> None:
        if self.away:
            raise Unreachable("Ray: no answer")


@dataclass
class FleetHarness:
    """A fleet whose cluster is scripted, and what a test does to it and to its database."""

    keeper: Keeper
    cluster: ScriptedCluster
    database: Database
    heartbeat: Heartbeat
    clock: Clock

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.keeper.look()
            await asyncio.gather(*(task for _, task in self.keeper._starting.values()))  # pyright: ignore[reportPrivateUsage]

    async def work(self, model: str, seconds: float, due_s: float = FAR) -> None:
        """Leave a planned batch with so many seconds of work."""
        async with self.database.write() as session:
            row = Batch(
                id=f"batch_{model}_{seconds}",
                status=BatchStatus.IN_PROGRESS,
                endpoint="/v1/chat/completions",
                input_file_id="file_x",
                completion_window="24h",
                model=model,
                total=10,
                planned=10,
                planned_compute_s=seconds,
                created_at=int(self.clock()),
                expires_at=int(self.clock() + due_s),
            )
            session.add(row)

    async def beat(self, name: str, model: str, slices: int = 0, **about: Any) -> None:
        await self.heartbeat.beat(name, {"name": name, "model": model, "slices": slices, **about})

    async def beat_all(self, slices: int = 0) -> None:
        for engine in self.cluster.there.values():
            await self.beat(engine.worker, engine.model, slices)


@pytest.fixture
async def build_fleet(database: Database, redis: Redis, clock: Clock) -> AsyncGenerator[Callable[..., Any]]:
    """A function that makes a FleetHarness of the GPUs of each machine and the settings of each model."""
    keepers: list[Keeper] = []

    async def build(gpus: dict[str, int], **models: dict[str, Any]) -> FleetHarness:
        await namespace_of(database)
        spec = FleetSpec.model_validate({"models": [{"name": name, **about} for name, about in models.items()]})
        cluster = ScriptedCluster(gpus)
        keeper = Keeper(database, redis, cluster, spec, clock, f"fleet-{len(keepers)}")
        keepers.append(keeper)
        return FleetHarness(keeper, cluster, database, Heartbeat(redis), clock)

    yield build
    for keeper in keepers:
        keeper._callers.shutdown()  # pyright: ignore[reportPrivateUsage]
        keeper._starters.shutdown()  # pyright: ignore[reportPrivateUsage]


async def test_an_engine_that_nothing_keeps_running_is_replaced(build_fleet: Any) -> None:
    """As after a fleet that asked it to stop and was then stopped itself."""
    fleet: FleetHarness = await build_fleet({"m": 8}, a={})
    await fleet.work("a", 100.0)
    await fleet.look()
    (first,) = fleet.cluster.there
    fleet.cluster.change(first, ended=True, pid=None)
    await fleet.look(2)
    assert fleet.cluster.ended == [first]
    assert len(fleet.cluster.there) == 1


async def test_a_machine_that_fails_rests_and_another_one_is_taken(build_fleet: Any) -> None:
    fleet: FleetHarness = await build_fleet({"bad": 4, "good": 8}, a={"max": 2})
    fleet.cluster.broken = {"bad"}
    await fleet.work("a", 7200.0)
    await fleet.look(3)
    assert [new.machines for new in fleet.cluster.started].count(["bad"]) <= 2  # at most those of the first look
    assert {engine.gpus_on[0][0] for engine in fleet.cluster.there.values()} == {"good"}
    assert len(fleet.cluster.there) == 2


async def test_a_worker_that_ends_after_minutes_each_time_is_given_up(build_fleet: Any) -> None:
    fleet: FleetHarness = await build_fleet({"m": 8}, a={})
    await fleet.work("a", 100.0)
    await fleet.look(2)
    (first,) = fleet.cluster.there
    fleet.cluster.change(first, exits=keeper_module.MOST_FAILURES - 1)
    await fleet.look()
    assert fleet.cluster.ended == []
    fleet.cluster.change(first, exits=keeper_module.MOST_FAILURES)
    await fleet.look(2)
    assert fleet.cluster.ended == [first]
    assert fleet.cluster.there == {}, "its only machine rests"


async def test_exits_before_it_was_ready_again_do_not_count(build_fleet: Any) -> None:
    fleet: FleetHarness = await build_fleet({"m": 8}, a={})
    await fleet.work("a", 100.0)
    await fleet.look(2)
    (name,) = fleet.cluster.there
    for exits in range(0, 3 * keeper_module.MOST_FAILURES, 2):
        fleet.cluster.change(name, exits=exits)
        await fleet.beat_all()
        await fleet.look()
    assert fleet.cluster.ended == []


async def test_a_start_that_hangs_is_given_up(build_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: FleetHarness = await build_fleet({"m": 8}, a={"start_s": 0.01})
    await fleet.work("a", 100.0)
    await fleet.look(2)
    assert fleet.cluster.ended == []
    monkeypatch.setattr(keeper_module, "LONGEST_START_S", 0.0)
    await asyncio.sleep(0.2)
    await fleet.look()
    assert len(fleet.cluster.ended) == 1


@pytest.mark.parametrize("fault", ["drained", "stalled", "none"])
async def test_only_other_workers_that_take_slices_count(build_fleet: Any, fault: str) -> None:
    fleet: FleetHarness = await build_fleet({"m": 8}, a={})
    await fleet.work("a", 100.0)
    await fleet.beat("by-hand", "a", slices=1, step_age_s=120.0 if fault == "stalled" else 0.1)
    if fault == "drained":
        async with fleet.database.write() as session:
            await drain(session, "by-hand", 1.0)
    await fleet.look()
    assert len(fleet.cluster.there) == (0 if fault == "none" else 1)


async def test_a_large_engine_gets_its_machine_although_small_ones_want_it_back(build_fleet: Any) -> None:
    """Both machines have a small engine; one makes room, and does not start there again."""
    fleet: FleetHarness = await build_fleet({"m": 8, "n": 8}, a={"gpus": 4}, b={"gpus": 4}, large={"gpus": 8})
    fleet.cluster.gpus = {"m": 4, "n": 4}
    await fleet.work("a", 100.0)
    await fleet.work("b", 100.0)
    await fleet.look(2)
    fleet.cluster.gpus = {"m": 8, "n": 8}
    await fleet.beat_all()
    await fleet.work("large", 200.0)
    await fleet.look()
    (asked,) = fleet.cluster.stopped
    fleet.cluster.change(asked, ended=True)
    await fleet.look(2)
    by_model = {engine.model: engine.gpus_on[0][0] for engine in fleet.cluster.there.values()}
    assert set(by_model) == {"a", "b", "large"}
    assert by_model["a"] == by_model["b"] != by_model["large"]


async def test_a_model_that_rests_on_the_free_machine_gets_the_other_one(build_fleet: Any) -> None:
    """No machine stays without work because its neighbour's engine is in the way."""
    fleet: FleetHarness = await build_fleet({"m": 8}, a={"gpus": 8, "max": 1}, rests={"gpus": 8, "max": 1})
    await fleet.work("a", 100.0)
    await fleet.look(2)
    fleet.cluster.gpus["n"] = 8
    fleet.cluster.broken.add("n")
    await fleet.beat_all()
    await fleet.work("rests", 100.0)
    await fleet.look()
    assert [(each.id.split("@")[0], each.machines) for each in fleet.cluster.started[1:]] == [("rests", ["n"])]
    fleet.cluster.broken.clear()
    await fleet.look()
    (asked,) = fleet.cluster.stopped
    fleet.cluster.change(asked, ended=True)
    await fleet.look(2)
    by_model = {engine.model: engine.gpus_on[0][0] for engine in fleet.cluster.there.values()}
    assert by_model == {"a": "n", "rests": "m"}
    await fleet.beat_all()
    await fleet.look(2)
    assert fleet.cluster.stopped == [asked]


async def test_a_machine_where_nothing_starts_takes_no_engine_from_another_one(build_fleet: Any) -> None:
    """Two models rest on it: neither takes the other's machine."""
    fleet: FleetHarness = await build_fleet({"m": 8}, a={"gpus": 8, "max": 1}, b={"gpus": 8, "max": 1})
    await fleet.work("a", 100.0)
    await fleet.look(2)
    fleet.cluster.gpus["n"] = 8
    fleet.keeper._rests.begin("a", ["n"])  # pyright: ignore[reportPrivateUsage]
    fleet.keeper._rests.begin("b", ["n"])  # pyright: ignore[reportPrivateUsage]
    await fleet.beat_all()
    await fleet.work("b", 100.0)
    await fleet.look(3)
    assert fleet.cluster.stopped == []


async def test_a_cluster_that_does_not_answer_changes_nothing(build_fleet: Any) -> None:
    fleet: FleetHarness = await build_fleet({"m": 8}, a={})
    await fleet.work("a", 100.0)
    await fleet.look(2)
    fleet.cluster.away = True
    with pytest.raises(Unreachable):
        await fleet.look()
    fleet.cluster.away = False
    await fleet.look()
    assert (fleet.cluster.stopped, fleet.cluster.ended) == ([], [])


async def test_engines_whose_machines_do_not_answer_yet_keep_their_gpus(build_fleet: Any) -> None:
    """As on a busy machine, where actors take minutes to begin."""
    fleet: FleetHarness = await build_fleet({"m": 7, "n": 8}, a={"max": 7}, c={"gpus": 8})
    fleet.cluster.silent = True
    await fleet.work("a", 100_000.0)
    await fleet.work("c", 100.0)
    await fleet.look()
    started = list(fleet.cluster.there)
    assert Counter(map(model_of, started)) == {"a": 7, "c": 1}
    await fleet.look(4)
    await fleet.beat_all(slices=1)
    await fleet.look(4)
    assert (fleet.cluster.stopped, fleet.cluster.ended, list(fleet.cluster.there)) == ([], [], started)


async def test_a_fleet_stops_soon_although_its_cluster_never_answers(
    build_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LEAVE_S", 0.1)
    fleet: FleetHarness = await build_fleet({"m": 8}, a={})
    answers, asked = threading.Event(), threading.Event()

    def engines() -> list[Engine]:
        asked.set()
        answers.wait()
        return []

    monkeypatch.setattr(fleet.cluster, "engines", engines)
    stop = asyncio.Event()
    task = asyncio.create_task(fleet.keeper.run(stop))
    try:
        assert await asyncio.to_thread(asked.wait, 60.0)
        stop.set()
        async with asyncio.timeout(30.0):
            await task
    finally:
        answers.set()


async def test_a_fleet_without_the_lease_changes_nothing(build_fleet: Any) -> None:
    first: FleetHarness = await build_fleet({"m": 8}, a={})
    second: FleetHarness = await build_fleet({"m": 8}, a={})
    await first.work("a", 100.0)
    await first.look()
    await second.look()
    assert (first.keeper.holds_lease, second.keeper.holds_lease) == (True, False)
    assert second.cluster.started == []
    async with first.database.write() as session:  # as if the first had slept for long
        await session.execute(update(FleetOwner).values(until=now_s() - 1))
    await second.look()
    await first.look()
    assert (first.keeper.holds_lease, second.keeper.holds_lease) == (False, True)
    assert len(second.cluster.started) == 1


async def test_a_busy_engine_that_must_go_is_drained_first(build_fleet: Any) -> None:
    fleet: FleetHarness = await build_fleet({"m": 8}, a={"min": 1})
    await fleet.look(2)
    (engine,) = fleet.cluster.there.values()
    await fleet.beat(engine.worker, "a", slices=2)
    fleet.keeper.spec = fleet.keeper.spec.model_copy(update={"models": []})
    await fleet.look()
    async with fleet.database.read() as session:
        assert await drained_workers(session) == {engine.worker}
    await fleet.look()
    assert fleet.cluster.stopped == []
    assert [member.phase for member in fleet.keeper.members] == [Phase.LEAVING]
    await fleet.beat(engine.worker, "a", slices=0)
    await fleet.look()
    assert fleet.cluster.stopped == [engine.id]
    fleet.cluster.change(engine.id, ended=True)
    await fleet.look()
    async with fleet.database.read() as session:
        assert await drained_workers(session) == set()
    assert fleet.cluster.there == {}


async def test_each_database_has_its_own_namespace(database: Database) -> None:
    name = await namespace_of(database)
    assert name == await namespace_of(database)
    async with database.read() as session:
        assert (await session.scalars(select(FleetOwner.namespace))).all() == [name]


async def test_a_fleet_leaves_when_the_last_start_ends_while_it_renews(
    build_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper: Any = (await build_fleet({"m": 8}, a={})).keeper
    keeper._starting["engine"] = (None, asyncio.create_task(asyncio.sleep(0)))

    async def renew() -> bool:
        keeper._starting.clear()  # as a start does at its end
        return True

    let_go = asyncio.Event()

    async def leave() -> None:
        let_go.set()

    monkeypatch.setattr(keeper._lease, "renew", renew)
    monkeypatch.setattr(keeper._lease, "let_go", leave)
    await keeper._leave()
    assert let_go.is_set()
