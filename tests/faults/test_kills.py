"""Random faults on each database, and requests that kill the engine: nothing is lost, doubled or run again.

`make chaos N=1000` runs a longer campaign of the same.
"""

import random
from collections.abc import Generator
from pathlib import Path

import pytest

from service.objects.storage import Storage
from service.settings import Settings
from tests.faults.campaign import campaign
from tests.faults.deployment import FAST, Deployment
from tests.integration.harness import demo_tokenizer


def deployment_settings(settings: Settings, folder: Path) -> Settings:
    return settings.model_copy(update={"model": str(demo_tokenizer(folder / "model")), **FAST})


@pytest.fixture
def deployment(
    tmp_path: Path, settings: Settings, request: pytest.FixtureRequest, database_url: str
) -> Generator[Deployment, None, None]:
    Storage.open(settings.storage)
    postgres = request.getfixturevalue("postgres") if "postgresql" in database_url else None
    made = Deployment(tmp_path / "run", deployment_settings(settings, tmp_path), random.Random(11), postgres)
    made.folder.mkdir()
    made.start()
    yield made
    made.stop()


@pytest.mark.timeout(1800)
def test_random_faults_lose_and_repeat_nothing(deployment: Deployment) -> None:
    campaign(deployment, faults=15, requests=2000, say=print)
    assert deployment.kept, "no shard was read at any fault"
    assert deployment.early_reads, "no output was read early"
