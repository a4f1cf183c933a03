"""A disk that is really full: what runs waits for room, what is new is refused, and then all goes on."""

import random
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from service.settings import Settings
from tests.faults.deployment import Deployment
from tests.faults.test_kills import deployment_settings

MIB = 1024 * 1024


@pytest.fixture
def small_disk(settings: Settings) -> Generator[Path, None, None]:
    """The store's folder, on a disk of 16 MiB."""
    folder = settings.data_dir / "objects"
    folder.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small disk needs root: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return ballast


@pytest.fixture
def deployment(small_disk: Path, settings: Settings, tmp_path: Path) -> Generator[Deployment, None, None]:
    made = Deployment(tmp_path / "run", deployment_settings(settings, tmp_path), random.Random(3))
    made.folder.mkdir()
    made.start()
    yield made
    made.stop()


def test_nothing_is_lost_on_a_full_disk(deployment: Deployment, small_disk: Path) -> None:
    batch_id, contents = deployment.submit(2000, 0, 20)
    while not any(small_disk.glob("shards/*/*")):
        time.sleep(0.01)
    ballast = fill(small_disk)
    time.sleep(3)
    assert not deployment.done(batch_id)
    upload = httpx.post(
        f"http://127.0.0.1:{deployment.settings.port}/v1/files",
        data={"purpose": "batch"},
        files={"file": b"{}\n" * MIB},
        timeout=30,
    )
    assert (upload.status_code, upload.json()["error"]["code"]) == (507, "insufficient_storage")
    ballast.unlink()
    deployment.judge(deployment.wait(batch_id), contents)
