"""One API and one planner for all hostile input; on PostgreSQL, which is stricter about what it stores than SQLite."""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import new_postgres_database
from tests.hostile.server import Role, running
from tests.integration.harness import demo_tokenizer


@dataclass(frozen=True)
class Deployment:
    """The folder, the database and the Redis that the API and the planner share."""

    folder: Path
    database_url: str
    redis_url: str


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory, postgres: Any, redis_server_url: str) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("hostile"), new_postgres_database(postgres), redis_server_url)


@pytest.fixture(scope="package")
def one_api(deployment: Deployment) -> Generator[Role, None, None]:
    with running("api", deployment.folder, deployment.database_url, deployment.redis_url) as found:
        yield found


@pytest.fixture(scope="package")
def one_planner(deployment: Deployment, one_api: Role) -> Generator[Role, None, None]:
    model = demo_tokenizer(deployment.folder / "model")
    with running(
        "planner", deployment.folder, deployment.database_url, deployment.redis_url, "--model", str(model)
    ) as found:
        yield found


@pytest.fixture
def api(one_api: Role) -> Generator[Role, None, None]:
    """What a test sends must never fail in a way that nobody foresaw."""
    yield from watched(one_api)


@pytest.fixture
def planner(one_planner: Role) -> Generator[Role, None, None]:
    yield from watched(one_planner)


def watched(role: Role) -> Generator[Role, None, None]:
    before = role.failures
    yield role
    assert role.process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    assert role.failures == before
