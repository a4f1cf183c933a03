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
from tests.faults.town import FAST, Town
from tests.integration.house import demo_tokenizer


def town_settings(settings: Settings, folder: Path) -> Settings:
    return settings.model_copy(update={"model": str(demo_tokenizer(folder / "model")), **FAST})


@pytest.fixture
def town(
    tmp_path: Path, settings: Settings, request: pytest.FixtureRequest, database_url: str
) -> Generator[Town, None, None]:
    Storage.open(settings.storage)
    postgres = request.getfixturevalue("postgres") if "postgresql" in database_url else None
    made = Town(tmp_path / "town", town_settings(settings, tmp_path), random.Random(11), postgres)
    made.folder.mkdir()
    made.start()
    yield made
    made.stop()


@pytest.mark.timeout(600)
def test_random_faults_lose_and_repeat_nothing(town: Town) -> None:
    campaign(town, faults=15, requests=2000, say=print)
    assert town.kept, "no shard was read at any fault"
    assert town.early_reads, "no output was read early"
