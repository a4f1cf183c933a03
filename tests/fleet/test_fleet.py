"""Fleets on a real Ray cluster with GPUs that do not exist, and real workers whose engines stand in."""

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from service.db.tables import BatchStatus
from service.fleet import keeper as keeper_module
from service.fleet import rests
from service.fleet.cluster import RayCluster
from service.fleet.engines import Engine
from service.fleet.members import Phase
from tests.fleet.deployment import MEMORY, Deployment, actors_of, kept, until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]
SHORT = 0.0005  # seconds of work by the cost model, of which these tests' requests have very little
ALL = [str(number) for number in range(64)]


async def test_engines_come_with_work_and_go_after_it(deployment: Deployment, cluster: RayCluster) -> None:
    """Sixteen GPUs, three models: one takes a whole machine, and the others share what is left."""
    spec = deployment.spec(a={"max": 8}, b={"gpus": 2, "max": 4}, c={"gpus": 8})
    keeper = await deployment.keeper(cluster, spec.model_copy(update={"seconds_per_engine": SHORT}))
    deployment.hold()  # a busy engine stays, so all batches must be there when the keeper first looks
    batches = [await deployment.submit(model, 64, 0.5) for model in "abc"]
    for batch in batches:
        await until("it is checked", lambda batch=batch: _is_checked(deployment, batch))
    async with kept(keeper):
        await until("six engines of a, one of b, one of c", lambda: _serve(deployment, a=6, b=1, c=1))
        deployment.release()
        for batch in batches:
            await until("every batch ends", lambda batch=batch: deployment.has_ended(batch))
            assert await deployment.answers(batch) == ALL
        await until("no engine is left", lambda: not keeper.members)
    await until("all GPUs are free", lambda: all(each.gpus == each.free for each in cluster.machines().values()))


async def test_a_lost_machine_is_replaced_and_no_line_with_it(
    deployment: Deployment, cluster: RayCluster, machines: Any
) -> None:
    third = machines.add_node(num_cpus=1, num_gpus=2, object_store_memory=MEMORY)
    machine = third.node_id
    try:
        await until("Ray sees the machine", lambda: machine in cluster.machines())
        keeper = await deployment.keeper(cluster, deployment.spec(lost={"gpus": 2, "max": 1, "min": 1}))
        async with kept(keeper):
            deployment.hold()  # on a slow machine, the work could end between two looks
            batch = await deployment.submit("lost", 64, 1.0)
            await until("it runs", lambda: [each.phase for each in keeper.members] == [Phase.BUSY])
            (first,) = keeper.members
            assert first.engine.gpus_on == [(machine, 2)]  # the machine with the fewest free GPUs
            deployment.release()
            machines.remove_node(third, allow_graceful=False)
            third = None

            def is_elsewhere() -> bool:
                there = [each for each in keeper.members if each.phase in (Phase.BUSY, Phase.IDLE)]
                return len(there) == 1 and there[0].engine.worker != first.engine.worker

            await until("another machine runs it", is_elsewhere)
            await until("the batch ends", lambda: deployment.has_ended(batch))
            assert await deployment.answers(batch) == ALL
        await until("its worker has ended", lambda: not _runs(first.engine))
    finally:
        if third is not None:
            machines.remove_node(third)


async def test_the_next_fleet_finds_the_engines(deployment: Deployment, cluster: RayCluster) -> None:
    """Two fleets on one database: one waits. When the first is gone, the second keeps the same engines."""
    spec = deployment.spec(shared={"max": 3})
    spec = spec.model_copy(update={"seconds_per_engine": SHORT, "idle_s": 60.0})
    first, second = [await deployment.keeper(cluster, spec, owner) for owner in ("first", "second")]
    deployment.hold()
    async with kept(first):
        await until("the first keeps the engines", lambda: first.holds_lease)
        batch = await deployment.submit("shared", 64, 0.5)
        await until("they serve", lambda: _serve(deployment, shared=3))
        before = {engine.id: engine.nodes[0].pid for engine in await _engines(cluster)}
        waiting = kept(second)
        await waiting.__aenter__()
        await until("the second waits", lambda: second.holds_lease is False)
    await until("the second keeps them", lambda: second.holds_lease and len(second.members) == 3)
    assert {engine.id: engine.nodes[0].pid for engine in await _engines(cluster)} == before
    assert not await deployment.has_ended(batch)
    deployment.release()
    await until("the batch ends", lambda: deployment.has_ended(batch))
    assert await deployment.answers(batch) == ALL
    await waiting.__aexit__(None, None, None)


async def test_a_worker_that_dies_starts_again_in_its_place(deployment: Deployment, cluster: RayCluster) -> None:
    keeper = await deployment.keeper(cluster, deployment.spec(mortal={"min": 1}))
    async with kept(keeper):
        await until("it serves", lambda: _serve(deployment, mortal=1))
        (before,) = await _engines(cluster)
        assert before.nodes[0].pid is not None
        os.kill(before.nodes[0].pid, signal.SIGKILL)

        async def is_again() -> bool:
            (now,) = await _engines(cluster)
            return now.exits == 1 and now.nodes[0].pid not in (None, before.nodes[0].pid)

        await until("it starts again", is_again)
        (after,) = await _engines(cluster)
        assert after.worker == before.worker
        assert after.nodes[0].exit == -signal.SIGKILL


async def test_an_engine_that_does_not_start_frees_its_gpus(
    deployment: Deployment, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "MOST_FAILURES", 2)  # the pauses between them grow
    monkeypatch.setattr(rests, "FIRST_S", rests.LONGEST_S)  # no other try while the test looks
    spec = deployment.spec(broken={"gpus": 8, "max": 1, "settings": {"TEST_FAULT": "1"}}, sound={"gpus": 8, "max": 2})
    keeper = await deployment.keeper(cluster, spec.model_copy(update={"seconds_per_engine": SHORT}))
    deployment.hold()
    async with kept(keeper):
        await deployment.submit("broken", 4, 0.1)
        await until("it starts", lambda: any(each.engine.model == "broken" for each in keeper.members))
        await until("no machine is left for it", lambda: keeper.targets.get("broken") == 0)
        batch = await deployment.submit("sound", 64, 0.5)
        await until("another model has all GPUs", lambda: _serve(deployment, sound=2))
        assert [each.engine.model for each in keeper.members] == ["sound", "sound"]
        deployment.release()
        await until("the batch ends", lambda: deployment.has_ended(batch))
        assert await deployment.answers(batch) == ALL


async def test_machines_of_one_engine_know_each_other(deployment: Deployment, cluster: RayCluster) -> None:
    async with kept(await deployment.keeper(cluster, deployment.spec(wide={"gpus": 8, "nodes": 2, "min": 1}))):
        await until("both machines run", lambda: _run(cluster, [8, 8]))
        (engine,) = await _engines(cluster)
        told = [psutil.Process(node.pid).environ() for node in sorted(engine.nodes, key=lambda node: node.rank)]
    assert [each["BATCHWEAVE_NODE_RANK"] for each in told] == ["0", "1"]
    assert {each["BATCHWEAVE_NODES"] for each in told} == {"2"}
    assert len({each["BATCHWEAVE_LEADER"] for each in told}) == 1
    assert [each["BATCHWEAVE_ENGINE_ARGS"] for each in told] == ['{"tp_size": 16}'] * 2
    assert len({machine for machine, _ in engine.gpus_on}) == 2
    assert "OMP_NUM_THREADS" not in told[0]
    keeper = await deployment.keeper(cluster, deployment.spec(wide={"gpus": 4, "nodes": 2, "min": 1}), "next")
    async with kept(keeper):
        await until("other settings, another engine", lambda: _run(cluster, [4, 4]))
    await (await deployment.keeper(cluster, keeper.spec, "last")).end_all(asyncio.Event())
    assert await _engines(cluster) == []


async def test_an_actor_that_dies_leaves_no_process(deployment: Deployment, cluster: RayCluster, machines: Any) -> None:
    keeper = await deployment.keeper(cluster, deployment.spec(orphan={"min": 1}))
    async with kept(keeper):
        await until("it serves", lambda: _serve(deployment, orphan=1))
        (engine,) = await _engines(cluster)
        worker = psutil.Process(engine.nodes[0].pid)
        supervisor = worker.parent()
        assert supervisor is not None
        await until("there is one actor", lambda: len(actors_of(machines)) == 1)
        actors_of(machines)[0].kill()
        await until("they end", lambda: not worker.is_running() and not supervisor.is_running())
        await until("another one serves", lambda: keeper.members and keeper.members[0].phase == Phase.IDLE)
        assert keeper.members[0].engine.id != engine.id


async def test_services_on_one_cluster_leave_each_other_alone(
    deployment: Deployment, cluster: RayCluster, machines: Any
) -> None:
    """A fleet ends engines that its file does not name, but only those of its own service."""
    keeper = await deployment.keeper(cluster, deployment.spec(mine={"min": 1}))
    async with kept(keeper):
        await until("it serves", lambda: _serve(deployment, mine=1))
    (engine,) = await _engines(cluster)
    cluster.close()
    other = RayCluster(machines.address, "batchweave-other")
    assert other.engines() == []
    other.tidy([])
    other.end(engine.id)
    other.close()
    again = RayCluster(machines.address, "batchweave-tests")
    assert [each.id for each in again.engines()] == [engine.id]
    assert _runs(engine)
    again.end(engine.id)
    await until("it ends", lambda: not _runs(engine))


async def _engines(cluster: RayCluster) -> list[Engine]:
    return await asyncio.to_thread(cluster.engines)


async def _serve(deployment: Deployment, **engines: int) -> bool:
    serving = await deployment.serving()
    return all(serving[model] == count for model, count in engines.items())


async def _is_checked(deployment: Deployment, batch_id: str) -> bool:
    return (await deployment.batch(batch_id)).status == BatchStatus.IN_PROGRESS


async def _run(cluster: RayCluster, gpus: list[int]) -> bool:
    """Return whether one engine is there, whose machines have so many GPUs each and all run."""
    engines = await _engines(cluster)
    nodes = [node for engine in engines for node in engine.nodes]
    return len(engines) == 1 and [node.gpus for node in nodes] == gpus and all(node.pid for node in nodes)


def _runs(engine: Engine) -> bool:
    return any(node.pid is not None and psutil.pid_exists(node.pid) for node in engine.nodes)
