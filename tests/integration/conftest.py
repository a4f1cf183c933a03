from collections.abc import Generator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from service.db.sessions import Database
from service.settings import Settings
from service.storage import Storage
from tests.conftest import Clock
from tests.integration.house import House, demo_tokenizer
from tests.integration.serving import serve


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_tokenizer(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture
def url(settings: Settings, clock: Clock) -> Generator[str, None, None]:
    """The API over HTTP, as `settings` have it."""
    with serve(settings, clock) as url:
        yield url


@pytest.fixture
async def house(
    database: Database, storage: Storage, redis: Redis, settings: Settings, clock: Clock, tokenizer: Path
) -> House:
    return await House.build(database, storage, redis, settings, clock, tokenizer)
