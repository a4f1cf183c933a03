"""A deployment for fleet tests: raylets with GPUs that do not exist, the service's jobs, and workers that stand in."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from redis.asyncio import Redis
from sqlalchemy import select

from service.db.clock import SharedClock
from service.db.migrate import upgrade
from service.db.models import register_model
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from service.fleet.cluster import RayCluster
from service.fleet.keeper import Keeper
from service.fleet.lease import namespace_of
from service.fleet.spec import FleetSpec
from service.jobs.runner import run_jobs
from service.objects.storage import Storage, file_key
from service.queue.bell import Bell, Job
from service.queue.connection import open_redis
from service.queue.progress import Heartbeat
from service.settings import Settings, load_settings
from tests import waiting
from tests.batches import CHAT, create_batch
from tests.hostile.server import redis_server

WORKER = (sys.executable, "-m", "tests.fleet.worker")
MEMORY = 80 * 2**20  # bytes of a raylet's object store, which nobody uses
# A machine that is gone is noticed after 3 s; by default after 18 s.
NOTICES = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
LIMIT_S = 600.0  # for anything to happen, on a machine that is busy


@contextmanager
def raylets(gpus: Sequence[int], **head: Any) -> Generator[Any]:
    """Run a Ray cluster with a head without GPUs, and a machine for each of these numbers of them.

    `head`: more arguments of the head.
    """
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    head |= {"num_cpus": 1, "num_gpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    with patch.object(services, "get_node", _until_it_is_there(services.get_node)):
        cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": NOTICES})
        try:
            for each in gpus:
                cluster.add_node(wait=False, num_cpus=1, num_gpus=each, object_store_memory=MEMORY)
            cluster.wait_for_nodes(timeout=LIMIT_S)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _until_it_is_there(ask: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Return what waits for LIMIT_S until the GCS knows a machine: Ray itself gives a raylet 30 s to start."""

    def get_node(gcs_address: str, node_id: str) -> Any:
        ends = time.monotonic() + LIMIT_S
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > ends:
                    raise
            time.sleep(0.5)

    return get_node


@contextmanager
def variables(folder: Path, lease_s: float = 30.0, **more: str) -> Generator[None]:
    """Set this process's variables as those with which `ray start` runs, so before the raylets start."""
    ours = {
        "BATCHWEAVE_LEASE_S": str(lease_s),
        "BATCHWEAVE_DATA_DIR": str(folder),
        "BATCHWEAVE_REDIS_URL": f"unix://{folder / 'redis.sock'}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **more,
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Deployment:
    """The parts of a service whose planner runs, and what a test of fleets does with them."""

    settings: Settings
    database: Database
    storage: Storage
    redis: Redis
    clock: SharedClock
    source: str  # of all models

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, **more: Any) -> AsyncGenerator["Deployment"]:
        """Run Redis and the jobs of the planner in `folder`, which `variables` names; `more`: other settings."""
        with redis_server(folder):
            source = str(ensure_tiny_model(folder / "model", corpus()))
            settings = load_settings(model=source, **more)
            await asyncio.to_thread(upgrade, settings.database)
            database, redis = Database(settings.database), open_redis(settings.redis)
            deployment = cls(settings, database, Storage.open(settings.storage), redis, SharedClock(database), source)
            await deployment.clock.sync()
            stop = asyncio.Event()
            jobs = asyncio.create_task(run_jobs(database, deployment.storage, redis, settings, stop))
            try:
                yield deployment
            finally:
                deployment.release()
                stop.set()
                await jobs
                await redis.aclose()
                await database.close()

    def hold(self) -> None:
        """Let no request begin on any engine, until `release`."""
        (self.settings.data_dir / "hold").touch()

    def release(self) -> None:
        (self.settings.data_dir / "hold").unlink(missing_ok=True)

    def spec(self, **models: dict[str, Any]) -> FleetSpec:
        """Return a fleet of these models, which takes engines away soon."""
        given = [{"name": name, "model": self.source, **about} for name, about in models.items()]
        return FleetSpec.model_validate({"models": given, "idle_s": 3.0, "switch_s": 5.0, "drain_s": 5.0})

    async def keeper(self, cluster: RayCluster, spec: FleetSpec, owner: str = "one", **changes: Any) -> Keeper:
        await namespace_of(self.database)
        for each in spec.models:
            own = load_settings(model=each.model, model_name=each.name)
            await register_model(self.database, own, 8192, [CHAT], {"gpu": "h200", "tp": 1})
        return Keeper(self.database, self.redis, cluster, spec, self.clock, owner, WORKER, look_s=1.0, **changes)

    async def submit(self, model: str, requests: int, seconds: float, window_s: int = 24 * 3600) -> str:
        """Create a batch whose requests take so long each."""
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": model,
                    "max_tokens": 8,
                    "messages": [{"role": "user", "content": f"{number},{seconds}"}],
                },
            }
            for number in range(requests)
        ]
        data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
        batch_id = await create_batch(self.database, self.storage, data, self.clock(), window_s)
        await Bell(self.redis, 1.0).ring(Job.VALIDATOR)
        return batch_id

    async def batch(self, batch_id: str) -> Batch:
        async with self.database.read() as session:
            return (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()

    async def lines(self, batch_id: str) -> tuple[list[str], list[str]]:
        """Return the custom ids in the output and in the error file of a batch; fail if it has not completed."""
        batch = await self.batch(batch_id)
        assert batch.status == BatchStatus.COMPLETED, batch.status
        found: list[list[str]] = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            data = await self.storage.read(file_key(file_id)) if file_id else b""
            found.append([json.loads(line)["custom_id"] for line in data.splitlines()])
        return found[0], found[1]

    async def answers(self, batch_id: str) -> list[str]:
        """Return the custom ids in the batch's output file, sorted."""
        return sorted((await self.lines(batch_id))[0], key=int)

    async def has_ended(self, batch_id: str) -> bool:
        return (await self.batch(batch_id)).status == BatchStatus.COMPLETED

    async def serving(self) -> Counter[str]:
        """Count the live workers of each model."""
        return Counter(state["model"] for state in await Heartbeat(self.redis).alive())


def actors_of(machines: Any) -> list[psutil.Process]:
    """Return the processes of the engines' actors on these raylets."""
    raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in machines.list_all_nodes()]
    found: list[psutil.Process] = []
    for child in [child for raylet in raylets for child in raylet.children()]:
        with suppress(psutil.NoSuchProcess):
            if any("ray::Actor" in word for word in child.cmdline()):
                found.append(child)
    return found


async def until(what: str, holds: Callable[[], Any], limit_s: float = LIMIT_S) -> float:
    """Wait as `waiting.until` does, and look ten times a second only: Ray's processes need the machine."""
    return await waiting.until(holds, what, limit_s, every_s=0.1)


@asynccontextmanager
async def kept(keeper: Keeper) -> AsyncGenerator[Keeper]:
    """Let the fleet run until the end of the block; its engines stay."""
    stop = asyncio.Event()
    task = asyncio.create_task(keeper.run(stop))
    try:
        yield keeper
    finally:
        stop.set()
        await task
