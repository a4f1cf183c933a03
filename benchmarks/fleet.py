"""Measure how soon a fleet has the engines that its work needs, on a real Ray cluster with GPUs that do not exist.

Two machines with 8 GPUs each, three models, real planner, queue and workers; the workers' engines stand in
(tests/fleet/worker.py), so that what is measured is the service and Ray. It prints the seconds from a submit to the
last of the engines that the work needs, from the end of the last batch to no engine, and from the end of a machine to
its engine elsewhere:

    python -m benchmarks.fleet
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from engine_ext import warm_up
from service.fleet.cluster import RayCluster
from service.fleet.members import Phase
from tests.fleet.deployment import MEMORY, Deployment, kept, raylets, until, variables

SHORT = 0.0005  # seconds of work for an engine: these requests have little by the cost model


async def measure(folder: Path, machines: Any) -> None:
    async with Deployment.open(folder) as deployment:
        cluster = RayCluster(machines.address, "batchweave-benchmark")
        spec = deployment.spec(a={"max": 8}, b={"gpus": 2, "max": 4}, c={"gpus": 8})
        spec = spec.model_copy(update={"seconds_per_engine": SHORT})
        async with kept(await deployment.keeper(cluster, spec)) as keeper:
            await until("the fleet keeps the engines", lambda: keeper.holds_lease)
            batches = [await deployment.submit(model, 64, 2.0) for model in "abc"]
            target = {"a": 6, "b": 1, "c": 1}
            took = await until("the right engines", lambda: serves(deployment, target))
            print(f"{took:5.1f} s from the submits to the engines: 6 x 1, 1 x 2 and 1 x 8 GPUs", flush=True)
            for batch in batches:
                await until("a batch ends", lambda batch=batch: deployment.has_ended(batch))
            took = await until("no engine", lambda: not keeper.members)
            print(
                f"{took:5.1f} s from the end of the last batch to no engine, with idle_s {spec.idle_s:.0f}", flush=True
            )
            third = machines.add_node(num_cpus=1, num_gpus=1, object_store_memory=MEMORY)
            await deployment.submit("a", 8 * 16, 5.0)
            await until("it runs", lambda: any(each.phase == Phase.BUSY for each in keeper.members))
            lost = next(each for each in keeper.members if each.engine.gpus_on[0][0] == third.node_id)
            machines.remove_node(third, allow_graceful=False)
            began = time.monotonic()
            await until("it is ended", lambda: lost.engine.id not in {each.engine.id for each in keeper.members})
            noticed = time.monotonic() - began
            left = {each.engine.id for each in keeper.members}

            def is_back() -> bool:
                new = [each for each in keeper.members if each.engine.id not in left]
                return any(each.phase in (Phase.BUSY, Phase.IDLE) for each in new)

            await until("another one serves", is_back)
            took = time.monotonic() - began
            print(f"{took:5.1f} s from a machine's end to its engine elsewhere; {noticed:.1f} s to notice", flush=True)
        for engine in cluster.engines():
            cluster.end(engine.id)
        cluster.close()


async def serves(deployment: Deployment, target: dict[str, int]) -> bool:
    return dict(await deployment.serving()) == target


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    warm_up.ensure()
    with (
        tempfile.TemporaryDirectory(prefix="batchweave-fleet-") as name,
        variables(Path(name)),
        raylets([8, 8]) as machines,
    ):
        asyncio.run(measure(Path(name), machines))


if __name__ == "__main__":
    main()
