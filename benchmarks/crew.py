"""Measure how one batch divides among several engines of one model, through the real planner, queue and workers.

The engines stand in: each answers some requests at a time, after a time that is drawn for each (benchmarks.paced). So
nothing but the service decides how long the batch takes. For each number of engines it prints the time from the first
request to the last answer, how many times as fast that is as the fastest engine alone on the same batch, how much
longer it is than an even division, and how much of the prefix sharing is kept, if each engine caches all that it runs:

    python -m benchmarks.crew                             # 1 and 16 engines
    python -m benchmarks.crew --paces 1,0.5 --requests 6400    # the second engine is half as fast
"""

import argparse
import asyncio
import json
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import structlog
from sqlalchemy import select

from benchmarks.paced import PacedEngine
from engine_ext import warm_up
from service.db.migrate import upgrade
from service.db.models import register_model
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from service.jobs.runner import run_jobs
from service.objects.storage import Storage
from service.queue.connection import open_redis
from service.queue.crew import CrewBoard
from service.settings import Settings, load_settings
from service.worker.loop import IN_FLIGHT, Worker
from tests.batches import CHAT, create_batch
from tests.hostile.server import redis_server

MODEL = "m"
DATABASE = "queue.db"
ALIKE = 20  # requests with a beginning in common
BEGINNING = 1200  # characters


def seconds(prompt: str, mean_s: float) -> float:
    """Return how long a request takes: from 0.2 to 1.8 times the mean, evenly spread."""
    return mean_s * (0.2 + 1.6 * (zlib.crc32(prompt.encode()) % 1000) / 1000)


def engine_of(at_once: int, mean_s: float, pace: float) -> PacedEngine:
    return PacedEngine(at_once, lambda prompt: seconds(prompt, mean_s) / pace)


def prompts(requests: int) -> list[str]:
    """Return prompts of which ALIKE at a time begin alike; all begin with a few words in common."""
    words = np.random.default_rng(7).integers(0, 10**9, size=(-(-requests // ALIKE), BEGINNING // 10))
    texts = [" ".join(map(str, row)) for row in words]
    return [f"Read and answer. {texts[n // ALIKE]} Question {n}." for n in range(requests)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="1,16", help="numbers of equal engines, with commas")
    parser.add_argument("--paces", help="instead: the pace of each engine; the first one is also measured alone")
    parser.add_argument("--requests", type=int, default=12_800)
    parser.add_argument("--at-once", type=int, default=8, help="requests that an engine runs at once")
    parser.add_argument("--mean-s", type=float, default=0.5, help="mean seconds of a request on an engine of pace 1")
    given = parser.parse_args()
    crews = [[1.0] * int(each) for each in given.engines.split(",")]
    if given.paces:
        paces = [float(each) for each in given.paces.split(",")]
        crews = [paces[:1], paces]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    warm_up.ensure()
    asked = prompts(given.requests)
    alone = None
    for paces in crews:
        with tempfile.TemporaryDirectory(prefix="batchweave-crew-") as name:
            engines = [engine_of(given.at_once, given.mean_s, pace) for pace in paces]
            upgrade(f"sqlite+aiosqlite:///{Path(name) / DATABASE}")
            begin, cpu_s = asyncio.run(measure(Path(name), asked, engines))
        took = max(each.ends[-1] for each in engines if each.ends) - begin
        even = sum(seconds(each, given.mean_s) for each in asked) / given.at_once / sum(paces)
        alone = alone or took * max(paces)
        ran = sum(engine.runs.total() for engine in engines)
        print(
            f"{len(paces):3} engines: {took:7.1f} s, {alone / took:5.2f} times the first alone, "
            f"{took / even - 1:6.1%} longer than even, last 5% {last_part(engines, begin, took):+.1%}, "
            f"sharing kept {kept(engines, asked):.4f}, {ran - given.requests} requests twice, {cpu_s:.0f} s of CPU",
            flush=True,
        )


def last_part(engines: Sequence[PacedEngine], begin: float, took: float) -> float:
    """Return by how much of the whole time the last 5% of the answers take longer than 5% of it."""
    ends = np.sort(np.concatenate([each.ends for each in engines]))
    return float(ends[-1] - ends[int(0.95 * len(ends)) - 1]) / took - 0.05


def kept(engines: Sequence[PacedEngine], asked: Sequence[str]) -> float:
    """Return the share of the possible prefix sharing that is left when each engine caches for itself."""
    piece = 40  # characters

    def distinct(texts: Sequence[str]) -> int:
        found = {text[:end] for text in texts for end in range(piece, len(text) + piece, piece)}
        return piece * len(found)

    total = sum(len(each) for each in asked)
    saved = total - sum(distinct(list(engine.runs)) for engine in engines)
    return saved / (total - distinct(asked))


async def measure(folder: Path, asked: Sequence[str], engines: Sequence[PacedEngine]) -> tuple[float, float]:
    """Run one batch on these engines; return when its first request began, and the CPU seconds of this process."""
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(redis_server(folder))
        settings = load_settings(
            database_url=f"sqlite:///{folder / DATABASE}",
            redis_url=redis_url,
            data_dir=folder,
            model=str(ensure_tiny_model(folder / "model", corpus())),
            model_name=MODEL,
            max_lines=max(50_000, len(asked)),
        )
        database, storage, redis = Database(settings.database), Storage.open(settings.storage), open_redis(redis_url)
        await register_model(database, settings, 8192, [CHAT])
        stop = asyncio.Event()
        tasks = [asyncio.create_task(run_jobs(database, storage, redis, settings, stop))]
        for number, engine in enumerate(engines):
            own = settings.model_copy(update={"worker_name": f"worker-{number}"})
            parts = (database, storage, redis, engine, own, time.time, IN_FLIGHT * engine.script.at_once)
            tasks.append(asyncio.create_task(Worker(*parts).run(stop)))
        while len(await CrewBoard(redis, MODEL).look()) < len(engines):
            await asyncio.sleep(0.1)
        before = time.process_time()
        batch_id = await submit(database, storage, settings, asked)
        while not any(engine.runs for engine in engines):
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        while (await status_of(database, batch_id)) != BatchStatus.COMPLETED:
            await asyncio.sleep(0.2)
        used = time.process_time() - before
        stop.set()
        await asyncio.gather(*tasks)
        await redis.aclose()
        await database.close()
        return begin, used


async def submit(database: Database, storage: Storage, settings: Settings, asked: Sequence[str]) -> str:
    lines = (
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": each}]},
        }
        for number, each in enumerate(asked)
    )
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    return await create_batch(database, storage, data, time.time())


async def status_of(database: Database, batch_id: str) -> BatchStatus:
    async with database.read() as session:
        return (await session.scalars(select(Batch.status).where(Batch.id == batch_id))).one()


if __name__ == "__main__":
    main()
