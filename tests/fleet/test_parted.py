"""A machine of a Ray cluster that is cut off at the network for longer than a lease, and comes back."""

import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import psutil
import pytest

from service.fleet.cluster import RayCluster
from service.fleet.keeper import Keeper
from service.fleet.members import Phase
from tests.faults.machines import Machine
from tests.faults.wire import reached
from tests.fleet.deployment import MEMORY, Deployment, kept, raylets, until, variables

pytestmark = pytest.mark.timeout(1800)
LEASE_S = 4.0
REQUESTS = 96


def join(machine: Machine, address: str, log: Path) -> ExitStack:
    """Let the machine join the Ray cluster with one GPU that does not exist, until the stack is closed."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("BATCHWEAVE_")}
    ours["RAY_gcs_rpc_server_reconnect_timeout_s"] = "86400"  # as docs/fleet.md says
    words = f"start --address={address} --node-ip-address={machine.there} --block --num-cpus=1 --num-gpus=1"
    stack = ExitStack()
    stack.enter_context(
        machine.process("ray.scripts.scripts", log, *words.split(), f"--object-store-memory={MEMORY}", **ours)
    )
    return stack


@pytest.mark.slow
async def test_a_machine_that_was_cut_off_is_replaced_and_comes_back(
    tmp_path: Path, postgres_url: str, two_machines: list[Machine]
) -> None:
    """Its worker still runs while another has taken its place; once the cable is whole, it ends, and none is lost."""
    first, second = two_machines
    async with AsyncExitStack() as stack:
        addresses = reached(second.here, stack, postgres_url, str(tmp_path / "redis.sock"))
        stack.enter_context(variables(tmp_path, LEASE_S, **addresses))
        deployment = await stack.enter_async_context(Deployment.open(tmp_path))
        ray = stack.enter_context(raylets([], node_ip_address=second.here))
        cluster = RayCluster(ray.address, "batchweave-parted")
        stack.callback(cluster.close)

        joined = join(first, ray.address, tmp_path / "log-first")
        stack.callback(joined.close)
        await until("the first machine is there", lambda: len(cluster.machines()) == 1)
        keeper = await stack.enter_async_context(
            kept(await deployment.keeper(cluster, deployment.spec(a={"max": 1}, b={"max": 1})))
        )
        batches = [await deployment.submit("a", REQUESTS, 1.0)]  # twelve seconds, of which the hold needs one
        await until("it runs", lambda: places(keeper) == {"a"})
        await until("it has answered some", lambda: deployment.storage.keys("shards"))
        deployment.hold()  # so that the batch does not end before the machines are there
        (lost,) = keeper.members
        worker = psutil.Process(lost.engine.nodes[0].pid)
        stack.enter_context(join(second, ray.address, tmp_path / "log-second"))
        await until("the second machine is there", lambda: len(cluster.machines()) == 2)

        first.cut()
        await until("another machine runs it", lambda: runs_elsewhere(keeper, lost.engine.id))
        assert worker.is_running()
        deployment.release()
        await until("the batch ends", lambda: deployment.has_ended(batches[0]))
        first.mend()
        await until("the worker that was cut off ends", lambda: not worker.is_running())
        joined.close()

        stack.callback(join(first, ray.address, tmp_path / "log-again").close)
        await until("the machine is back", lambda: len(cluster.machines()) == 2)
        deployment.hold()
        batches += [await deployment.submit(model, REQUESTS, 0.2) for model in "ab"]
        await until("both machines run", lambda: places(keeper) == {"a", "b"})
        deployment.release()
        for each in batches:
            await until("every batch ends", lambda each=each: deployment.has_ended(each))
            assert await deployment.answers(each) == [str(number) for number in range(REQUESTS)]
        await until("no engine is left", lambda: not keeper.members)


def places(keeper: Keeper) -> set[str]:
    """Return the models whose engines run requests."""
    return {each.engine.model for each in keeper.members if each.phase == Phase.BUSY}


def runs_elsewhere(keeper: Keeper, lost: str) -> bool:
    return [each.engine.id != lost for each in keeper.members if each.phase == Phase.BUSY] == [True]
