from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest

from service.fleet.cluster import RayCluster
from tests.fleet.deployment import Deployment, raylets, variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The folder of a service, which this process's variables name; not for longer than the tests of one file."""
    folder = tmp_path_factory.mktemp("fleet")
    with variables(folder):
        yield folder


@pytest.fixture(scope="module")
def machines(folder: Path) -> Generator[Any]:
    """A Ray cluster with two machines of 8 GPUs each, which do not exist."""
    with raylets([8, 8]) as cluster:
        yield cluster


@pytest.fixture
def cluster(machines: Any) -> Generator[RayCluster]:
    cluster = RayCluster(machines.address, "batchweave-tests")
    yield cluster
    for engine in cluster.engines():
        cluster.end(engine.id)
    cluster.close()


@pytest.fixture
async def deployment(folder: Path) -> AsyncGenerator[Deployment]:
    """A service whose planner runs until the end of the test."""
    async with Deployment.open(folder) as deployment:
        yield deployment
