from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from service.db.sessions import Database
from service.jobs import planner
from service.objects.storage import Storage
from service.settings import Settings
from service.worker import loop
from tests.conftest import Clock
from tests.integration.browsing import OWN_PAGE
from tests.integration.harness import Harness, demo_tokenizer
from tests.integration.online_harness import OnlineHarness
from tests.integration.serving import serve
from tests.waiting import LIMIT_S

PAGES: dict[str, Any] = {"follow_redirects": True, "headers": OWN_PAGE, "timeout": LIMIT_S}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_tokenizer(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(autouse=True)
def workers_stop_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TAKE_MS", 50)


@pytest.fixture
def windows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever came before stays in its window."""
    monkeypatch.setattr(planner, "MOST_AGAIN", 0)


@pytest.fixture
def url(settings: Settings, clock: Clock) -> Generator[str, None, None]:
    """The API over HTTP, as `settings` have it."""
    with serve(settings, clock) as url:
        yield url


@pytest.fixture
async def harness(
    database: Database, storage: Storage, redis: Redis, settings: Settings, clock: Clock, tokenizer: Path
) -> Harness:
    """The service's jobs on real parts, which a test runs step by step."""
    return await Harness.build(database, storage, redis, settings, clock, tokenizer)


@pytest.fixture
async def pages(settings: Settings, clock: Clock) -> AsyncGenerator[httpx.AsyncClient, None]:
    with serve(settings, clock) as url:
        async with httpx.AsyncClient(base_url=f"{url}/dashboard", **PAGES) as client:
            yield client


@pytest.fixture
async def guarded(settings: Settings, clock: Clock) -> AsyncGenerator[httpx.AsyncClient, None]:
    """One that asks for keys."""
    with serve(settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with httpx.AsyncClient(base_url=f"{url}/dashboard", **PAGES) as client:
            yield client


@pytest.fixture
async def online(harness: Harness, settings: Settings, clock: Clock) -> AsyncGenerator[OnlineHarness, None]:
    """An API over HTTP and the doors of workers, for online requests."""
    settings = settings.model_copy(update={"secret_key": "s" * 32})
    with serve(settings, clock) as url:
        yield OnlineHarness(harness, settings, url)
