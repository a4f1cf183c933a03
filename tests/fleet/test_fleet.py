"""Fleets on a real Ray cluster with GPUs that do not exist, and real workers whose engines stand in."""

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from service.fleet import keeper as keeper_module
from service.fleet.cluster import RayCluster
from service.fleet.engines import Engine
from service.fleet.members import Phase
from tests.fleet.town import MEMORY, Town, kept, until

SHORT = 0.0005  # seconds of work by the cost model, of which these tests' requests have very little


async def test_engines_come_with_work_and_go_after_it(town: Town, cluster: RayCluster) -> None:
    """Sixteen GPUs, three models: one takes a whole machine, and the others share what is left."""
    spec = town.spec(a={"max": 8}, b={"gpus": 2, "max": 4}, c={"gpus": 8})
    keeper = await town.keeper(cluster, spec.model_copy(update={"seconds_per_engine": SHORT}))
    async with kept(keeper):
        batches = [await town.submit(model, 64, 2.0) for model in "abc"]

        async def all_serve() -> bool:
            return dict(await town.serving()) == {"a": 6, "b": 1, "c": 1}

        await until("six engines of a, one of b, one of c", all_serve)
        for batch in batches:
            await until("every batch ends", lambda batch=batch: town.has_ended(batch))
            assert await town.answers(batch) == [str(number) for number in range(64)]
        await until("no engine is left", lambda: not keeper.members)
    await until("all GPUs are free", lambda: sum(cluster.machines().values()) == 16)


async def test_a_lost_machine_is_replaced_and_no_line_with_it(town: Town, cluster: RayCluster, machines: Any) -> None:
    third = machines.add_node(num_cpus=1, num_gpus=2, object_store_memory=MEMORY)
    spec = town.spec(lost={"gpus": 2, "max": 1, "min": 1})
    keeper = await town.keeper(cluster, spec)
    async with kept(keeper):
        batch = await town.submit("lost", 48, 3.0)
        await until("it runs", lambda: [each.phase for each in keeper.members] == [Phase.BUSY])
        (first,) = keeper.members
        assert first.engine.nodes[0].machine == third.node_id  # the machine with the fewest free GPUs
        machines.remove_node(third, allow_graceful=False)

        async def elsewhere() -> bool:
            there = [each for each in keeper.members if each.phase == Phase.BUSY]
            return len(there) == 1 and there[0].engine.worker != first.engine.worker

        await until("another machine runs it", elsewhere)
        await until("the batch ends", lambda: town.has_ended(batch))
        assert await town.answers(batch) == [str(number) for number in range(48)]
    assert not psutil.pid_exists(first.engine.nodes[0].pid or 0), "its worker is left"


async def test_the_next_fleet_finds_the_engines(town: Town, cluster: RayCluster) -> None:
    """Two fleets on one database: one waits. When the first is gone, the second keeps the same engines."""
    spec = town.spec(shared={"max": 3})
    spec = spec.model_copy(update={"seconds_per_engine": SHORT, "idle_s": 60.0})
    first, second = [await town.keeper(cluster, spec, owner) for owner in ("first", "second")]
    async with kept(second):
        async with kept(first):
            await until("one of them keeps the engines", lambda: None not in (first.keeps, second.keeps))
            assert sorted([bool(first.keeps), bool(second.keeps)]) == [False, True]
            batch = await town.submit("shared", 64, 2.0)
            await until("its engines serve", lambda: _serve(town, shared=3))
            before = {engine.id: engine.nodes[0].pid for engine in cluster.engines()}
        await until("the other keeps them", lambda: bool(second.keeps and second.members))
        await until("the batch ends", lambda: town.has_ended(batch))
        after = {engine.id: engine.nodes[0].pid for engine in cluster.engines()}
        assert len(before) == 3
        assert after == before
    assert await town.answers(batch) == [str(number) for number in range(64)]


async def test_a_worker_that_dies_starts_again_in_its_place(town: Town, cluster: RayCluster) -> None:
    spec = town.spec(mortal={"min": 1})
    keeper = await town.keeper(cluster, spec)
    async with kept(keeper):
        await until("it serves", lambda: _serve(town, mortal=1))
        (before,) = cluster.engines()
        os.kill(before.nodes[0].pid or 0, signal.SIGKILL)

        async def again() -> bool:
            (now,) = cluster.engines()
            return now.nodes[0].failures == 1 and now.nodes[0].pid not in (None, before.nodes[0].pid)

        await until("it starts again", again)
        (after,) = cluster.engines()
        assert after.worker == before.worker
        assert after.nodes[0].exit == -signal.SIGKILL


async def test_an_engine_that_does_not_start_frees_its_gpus(
    town: Town, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "MOST_FAILURES", 3)  # the pauses between them grow
    spec = town.spec(broken={"gpus": 8, "max": 1, "settings": {"TEST_FAULT": "1"}}, sound={"gpus": 8, "max": 2})
    keeper = await town.keeper(cluster, spec.model_copy(update={"seconds_per_engine": SHORT}))
    async with kept(keeper):
        await town.submit("broken", 4, 0.1)
        await until("it starts", lambda: any(each.engine.model == "broken" for each in keeper.members))
        await until("it is given up", lambda: keeper.targets["broken"] == 0)
        batch = await town.submit("sound", 64, 2.0)
        await until("another model has all GPUs", lambda: _serve(town, sound=2))
        await until("the batch ends", lambda: town.has_ended(batch))


async def test_machines_of_one_engine_know_each_other(town: Town, cluster: RayCluster) -> None:
    spec = town.spec(wide={"gpus": 8, "nodes": 2, "min": 1})
    keeper = await town.keeper(cluster, spec)
    async with kept(keeper):
        await until("both machines run", lambda: _pids(cluster.engines()) == 2)
        (engine,) = cluster.engines()
        told = [psutil.Process(node.pid).environ() for node in sorted(engine.nodes, key=lambda node: node.rank)]
        assert [each["BATCHWEAVE_NODE_RANK"] for each in told] == ["0", "1"]
        assert {each["BATCHWEAVE_NODES"] for each in told} == {"2"}
        assert len({each["BATCHWEAVE_LEADER"] for each in told}) == 1
        assert [each["BATCHWEAVE_ENGINE_ARGS"] for each in told] == ['{"tp_size": 16}'] * 2
        assert len({node.machine for node in engine.nodes}) == 2
        assert "OMP_NUM_THREADS" not in told[0]
    spec = town.spec(wide={"gpus": 4, "nodes": 2, "min": 1})
    async with kept(await town.keeper(cluster, spec, "next")) as keeper:
        await until("other settings, another engine", lambda: _gpus(cluster.engines()) == [4, 4])
    await keeper.end_all(asyncio.Event())
    assert cluster.engines() == []


async def test_an_actor_that_dies_leaves_no_process(town: Town, cluster: RayCluster) -> None:
    spec = town.spec(orphan={"min": 1})
    keeper = await town.keeper(cluster, spec)
    async with kept(keeper):
        await until("it serves", lambda: _serve(town, orphan=1))
        (engine,) = cluster.engines()
        worker = psutil.Process(engine.nodes[0].pid)
        supervisor = worker.parent()
        assert supervisor is not None
        actors = [
            each for each in psutil.process_iter(["cmdline"]) if "ray::Actor" in " ".join(each.info["cmdline"] or [])
        ]
        assert len(actors) == 1
        actors[0].kill()
        await until("they end", lambda: not worker.is_running() and not supervisor.is_running())
        await until("another one serves", lambda: _pids(cluster.engines()) == 1)


async def _serve(town: Town, **engines: int) -> bool:
    serving = await town.serving()
    return all(serving[model] == count for model, count in engines.items())


def _pids(engines: list[Engine]) -> int:
    return sum(node.pid is not None for engine in engines for node in engine.nodes)


def _gpus(engines: list[Engine]) -> list[int]:
    return [node.gpus for engine in engines for node in engine.nodes]
