"""A campaign of random faults on a fleet: `python -m tests.fleet.campaign N [--seed S]`.

Workers, their supervisors and their actors are killed, workers sleep for longer than a lease, machines are lost and
others come, workers are drained, and fleets die and are followed by others. Every request of every batch must have one
answer, and at the end no process may be left.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import structlog

from engine_ext import warm_up
from service.db.drains import drain
from service.fleet.cluster import RayCluster
from service.fleet.keeper import Keeper
from tests.fleet.deployment import MEMORY, Deployment, raylets, until, variables
from tests.processes import words_of
from tests.waiting import kill

MODELS: dict[str, dict[str, Any]] = {"a": {"max": 4}, "b": {"gpus": 2, "max": 2}}
SHORT = 0.0005  # seconds of work by the cost model, of which these requests have very little
LEASE_S = 4
SLEEPS_S = 1.5 * LEASE_S
MACHINES = [2, 2, 4]  # GPUs
LIMIT_S = 600.0
# A lost machine's engines are started again elsewhere, which takes the longest: more of them would leave no work.
KINDS = {"worker": 4, "supervisor": 2, "actor": 2, "sleep": 3, "drain": 2, "fleet": 2, "machine": 1}


class Campaign:
    """Keeps a fleet and its batches, and lets things happen to them."""

    def __init__(
        self, deployment: Deployment, machines: Any, cluster: RayCluster, rng: random.Random, in_main: "InMain"
    ) -> None:
        self.deployment, self.machines, self.cluster, self.rng = deployment, machines, cluster, rng
        self._in_main = in_main
        self.happened: Counter[str] = Counter()
        self.ran: set[int] = set()  # pids of workers and supervisors
        self.answered = self.refused = 0
        self._batches: dict[str, int] = {}  # requests by id
        self._keeper: Keeper | None = None
        self._kept: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._sleeping: set[asyncio.Task[None]] = set()

    async def next_fleet(self) -> None:
        """Let the fleet die in the middle of whatever it does, and start another one."""
        if self._kept is not None and self._keeper is not None:
            await kill(self._kept)
        spec = self.deployment.spec(**MODELS).model_copy(update={"seconds_per_engine": SHORT, "idle_s": 60.0})
        self._keeper = await self.deployment.keeper(self.cluster, spec, f"fleet-{self.rng.random()}")
        self._kept = asyncio.create_task(self._keeper.run(self._stop))

    async def keep_busy(self, requests: int) -> None:
        """Judge the batches that have ended, and let each model have one."""
        for batch_id in list(self._batches):
            if await self.deployment.has_ended(batch_id):
                await self.judge(batch_id)
        running = {(await self.deployment.batch(each)).model for each in self._batches}
        for model in MODELS.keys() - running:
            batch_id = await self.deployment.submit(model, requests, 0.5)
            self._batches[batch_id] = requests
            await until("it is validated", lambda each=batch_id: self._is_validated(each))

    async def _is_validated(self, batch_id: str) -> bool:
        return (await self.deployment.batch(batch_id)).model is not None

    async def judge(self, batch_id: str) -> None:
        """Fail unless each request of an ended batch has exactly one line."""
        requests = self._batches.pop(batch_id)
        answered, refused = await self.deployment.lines(batch_id)
        assert sorted(map(int, [*answered, *refused])) == list(range(requests)), f"{batch_id}: lost or doubled lines"
        self.answered += len(answered)
        self.refused += len(refused)

    async def fault(self) -> str | None:
        """Let something happen; return what, or None if there is nothing that it could happen to."""
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        happens: dict[str, Callable[[], Awaitable[bool]]] = {
            "worker": lambda: self._to_worker(lambda worker: worker.kill()),
            "supervisor": lambda: self._to_worker(lambda worker: _parent(worker).kill()),
            "actor": self._actor,
            "sleep": self._sleep,
            "drain": self._drain,
            "fleet": self._fleet,
            "machine": self._machine,
        }
        if not await happens[kind]():
            return None
        self.happened[kind] += 1
        return kind

    async def workers(self) -> list[tuple[str, psutil.Process]]:
        """Return the names and processes of the workers that run now."""
        found: list[tuple[str, psutil.Process]] = []
        for engine in await asyncio.to_thread(self.cluster.engines):
            for node in engine.nodes:
                if node.pid is not None and psutil.pid_exists(node.pid):
                    self.ran.add(node.pid)
                    found.append((node.name, psutil.Process(node.pid)))
        return found

    async def _to_worker(self, happens: Callable[[psutil.Process], None]) -> bool:
        workers = await self.workers()
        if not workers:
            return False
        try:
            happens(self.rng.choice(workers)[1])
        except psutil.NoSuchProcess:
            return False
        return True

    async def _actor(self) -> bool:
        raylets = [
            psutil.Process(node.all_processes["raylet"][0].process.pid) for node in self.machines.list_all_nodes()
        ]
        children = [child for raylet in raylets for child in raylet.children()]
        actors = [child for child in children if "ray::Actor" in words_of(child)]
        if actors:
            self.rng.choice(actors).kill()
        return bool(actors)

    async def _sleep(self) -> bool:
        """Let a worker sleep for longer than its leases, as one that is cut off, and come back."""
        workers = await self.workers()
        if not workers:
            return False
        task = asyncio.create_task(_slept(self.rng.choice(workers)[1]))
        self._sleeping.add(task)
        task.add_done_callback(self._sleeping.discard)
        return True

    async def _drain(self) -> bool:
        workers = await self.workers()
        if not workers:
            return False
        async with self.deployment.database.write() as session:
            await drain(session, self.rng.choice(workers)[0], self.deployment.clock())
        return True

    async def _fleet(self) -> bool:
        await self.next_fleet()
        return True

    async def _machine(self) -> bool:
        """Lose a machine, and give another one like it."""
        node = self.rng.choice(sorted(self.machines.worker_nodes, key=lambda node: node.node_id))
        gpus = int(node._ray_params.num_gpus)
        await asyncio.to_thread(self.machines.remove_node, node, False)
        like_it = partial(self.machines.add_node, num_cpus=1, num_gpus=gpus, object_store_memory=MEMORY)
        await self._in_main.run(like_it)
        return True

    async def finish(self) -> None:
        """Wait for all batches, end the fleet, and fail if a process is left."""
        for batch_id in list(self._batches):
            await until("the last batches end", lambda each=batch_id: self.deployment.has_ended(each), LIMIT_S)
            await self.judge(batch_id)
        self._stop.set()
        assert self._kept is not None
        await self._kept
        await self.workers()
        assert self._keeper is not None
        last = await self.deployment.keeper(self.cluster, self._keeper.spec, "last")
        await last.end_all(asyncio.Event())
        await until("no process is left", lambda: not any(_is_worker(pid) for pid in self.ran))


class InMain:
    """Runs functions in the main thread, where Ray handles signals, while an event loop runs in another.

    A raylet takes up to half a minute to start on a busy machine, for which the jobs of the loop's service must not
    stand still: they hold the database's lock.
    """

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what the function returns in the main thread."""
        ended = Future[Any]()

        def call() -> None:
            try:
                ended.set_result(function())
            except Exception as error:
                ended.set_exception(error)

        self._calls.put(call)
        return await asyncio.wrap_future(ended)

    def beside(self, main: Coroutine[Any, Any, Campaign]) -> Campaign:
        """Return what a coroutine returns that runs in another thread."""
        with ThreadPoolExecutor(1) as thread:
            ran = thread.submit(asyncio.run, main)
            ran.add_done_callback(lambda _: self._calls.put(None))
            while (call := self._calls.get()) is not None:
                call()
            return ran.result()


async def _slept(worker: psutil.Process) -> None:
    try:
        worker.suspend()
        await asyncio.sleep(SLEEPS_S)
        worker.resume()
    except psutil.NoSuchProcess:
        return


def _parent(worker: psutil.Process) -> psutil.Process:
    parent = worker.parent()
    assert parent is not None
    return parent


def _is_worker(pid: int) -> bool:
    try:
        return "tests.fleet.worker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


async def campaign(folder: Path, machines: Any, faults: int, seed: int, requests: int, in_main: InMain) -> Campaign:
    """Let so many faults happen; raises AssertionError if a line is lost or doubled, or a process is left."""
    async with Deployment.open(folder) as deployment:
        cluster = RayCluster(machines.address, "batchweave-tests")
        found = Campaign(deployment, machines, cluster, random.Random(seed), in_main)
        await found.next_fleet()
        while found.happened.total() < faults:
            await found.keep_busy(requests)
            await asyncio.sleep(found.rng.random() * 4.0)
            if (kind := await found.fault()) is not None:
                print(f"{found.happened.total()}: {kind}", flush=True)
        await found.finish()
        cluster.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=300)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    warm_up.ensure()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="batchweave-chaos-") as name,
        variables(Path(name), LEASE_S),
        raylets(MACHINES) as machines,
    ):
        in_main = InMain()
        found = in_main.beside(campaign(Path(name), machines, given.faults, given.seed, given.requests, in_main))
    print(
        f"{time.monotonic() - started:.0f} s; faults: {dict(found.happened)}; {found.answered} requests answered, "
        f"{found.refused} refused because workers died with them; none lost, none twice, no process left"
    )


if __name__ == "__main__":
    main()
