"""The network between the service and PostgreSQL is cut, without anybody being told."""

import random
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import make_url

from service.db.migrate import upgrade
from service.settings import Settings, load_settings
from tests.conftest import Clock, new_postgres_database
from tests.faults.deployment import Deployment
from tests.faults.test_kills import deployment_settings
from tests.faults.wire import Wire, socket_of
from tests.integration.serving import serve


@pytest.fixture
def wired(tmp_path: Path, postgres: Any, redis_url: str) -> Settings:
    url = new_postgres_database(postgres)
    upgrade(url)
    settings = load_settings(data_dir=tmp_path / "data", database_url=url, redis_url=redis_url, model_name="test-model")
    # A lost wire costs this timeout.
    return deployment_settings(settings, tmp_path).model_copy(update={"database_timeout_s": 10.0})


@pytest.fixture
def wire(wired: Settings) -> Generator[Wire, None, None]:
    made = Wire(socket_of(wired.database_url or ""))
    yield made
    made.close()


@pytest.fixture
def deployment(tmp_path: Path, wired: Settings, wire: Wire, postgres: Any) -> Generator[Deployment, None, None]:
    made = Deployment(tmp_path / "run", wired, random.Random(7), postgres, wire)
    made.folder.mkdir()
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("fault", ["lost", "frozen"])
@pytest.mark.slow
def test_workers_that_hear_nothing_of_the_database_come_back(deployment: Deployment, wire: Wire, fault: str) -> None:
    """For ever or for some seconds: their slices go to others, and then they work again."""
    for _ in range(2):
        batch_id, contents = deployment.submit(2000, 0, 20)
        until = time.monotonic() + 30
        while not wire.connections and time.monotonic() < until:
            time.sleep(0.05)
        assert wire.connections > 0
        time.sleep(0.5)
        if fault == "lost":
            wire.lose()
        else:
            wire.freeze()
            time.sleep(2 * deployment.settings.lease_s)
            wire.thaw()
        deployment.judge(deployment.wait(batch_id), contents)


def test_api_says_that_the_database_is_silent(wired: Settings, wire: Wire, clock: Clock) -> None:
    url = make_url(wired.database_url or "").set(host="127.0.0.1", port=wire.port, query={})
    settings = wired.model_copy(update={"database_url": url.render_as_string(False), "database_timeout_s": 0.5})
    with serve(settings, clock) as api:
        assert httpx.get(f"{api}/v1/batches").status_code == 200
        wire.lose()
        silent = httpx.get(f"{api}/v1/batches", timeout=30)
        assert (silent.status_code, silent.json()["error"]["code"]) == (503, "database_unavailable")
        assert "Retry-After" in silent.headers
        assert httpx.get(f"{api}/v1/batches").status_code == 200
        wire.freeze()
        assert httpx.get(f"{api}/v1/batches", timeout=30).status_code == 503
        wire.thaw()
        assert httpx.get(f"{api}/v1/batches", timeout=30).status_code == 200
