import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, processes: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "--dist", "loadfile", "--no-loadscope-reorder"]
    return subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_process_that_dies_fails_one_test_and_all_others_run(tmp_path: Path, processes: str) -> None:
    """Before its death it ran files to their end, and it had others waiting: neither may stop the rest."""
    passes, dies = "def test_{}():\n    pass\n", "import os\ndef test_{}():\n    os._exit(1)\n"
    for number in (0, 1, 2, 3, 4, 5, 8, 9):
        (tmp_path / f"test_{number}.py").write_text(passes.format("it"))
    (tmp_path / "test_6.py").write_text(passes.format("before") + dies.format("it") + passes.format("after"))
    (tmp_path / "test_7.py").write_text(dies.format("it"))
    (tmp_path / "conftest.py").write_text("from tests.scheduling import pytest_xdist_make_scheduler\n")
    found = run(tmp_path, processes)
    assert "2 failed, 10 passed" in found.stdout, found.stdout + found.stderr


@pytest.mark.slow
def test_files_that_stand_alone_share_no_process_with_others(tmp_path: Path) -> None:
    writes = "import os, pathlib\ndef test_it():\n"
    writes += "    pathlib.Path(__file__).with_suffix('.pid').write_text(str(os.getpid()))\n"
    (tmp_path / "alone").mkdir()
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(writes)
        (tmp_path / "alone" / f"test_alone_{number}.py").write_text(writes)
    conftest = "from tests import scheduling\nfrom tests.scheduling import pytest_xdist_make_scheduler\n"
    (tmp_path / "conftest.py").write_text(f"{conftest}scheduling.ALONE = 'alone/'\n")
    found = run(tmp_path, "3")
    assert "12 passed" in found.stdout, found.stdout + found.stderr
    alone = {file.read_text() for file in (tmp_path / "alone").glob("*.pid")}
    others = {file.read_text() for file in tmp_path.glob("*.pid")}
    assert len(alone) == 1
    assert not alone & others
