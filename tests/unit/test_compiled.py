"""Compiled functions do not outlive the sources that were compiled into them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine_ext import warm_up

ENGINE_EXT = Path(__file__).parents[2] / "engine_ext"


def test_a_changed_constant_of_another_file_is_compiled_again(tmp_path: Path) -> None:
    """Numba itself would not notice: SWEEP stands in sweep.py and `decide` in decide.py."""
    package = tmp_path / "engine_ext"
    (package / "plan").mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(ENGINE_EXT / "compiled.py", package / "compiled.py")
    (package / "plan/__init__.py").touch()
    (package / "plan/number.py").write_text("NUMBER = 1\n")
    (package / "plan/asks.py").write_text(
        "from engine_ext.compiled import compiled\n"
        "from engine_ext.plan.number import NUMBER\n\n\n"
        "@compiled\ndef ask() -> int:\n    return NUMBER\n"
    )
    command = [sys.executable, "-c", "from engine_ext.plan.asks import ask; print(ask())"]
    cache = tmp_path / "cache"
    fresh = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(cache)}

    def ask() -> str:
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, env=fresh
        ).stdout.strip()

    assert ask() == "1"
    kept = list(cache.rglob("*.nbi"))
    assert kept
    (package / "plan/number.py").write_text("NUMBER = 2\n")
    assert ask() == "2"


def test_a_copy_in_another_folder_finds_what_was_compiled(tmp_path: Path) -> None:
    """Each clone of a repository would take minutes otherwise."""
    command = [sys.executable, "-c", "from engine_ext.plan.buckets import bucket_of\nprint(bucket_of(20))"]
    cache = tmp_path / "cache"
    written: list[set[tuple[Path, int]]] = []
    for name in ("one", "two"):
        shutil.copytree(ENGINE_EXT, tmp_path / name / "engine_ext", ignore=shutil.ignore_patterns("__pycache__"))
        fresh = {**os.environ, "PYTHONPATH": str(tmp_path / name), "NUMBA_CACHE_DIR": str(cache)}
        subprocess.run(command, cwd=tmp_path / name, check=True, env=fresh)
        written.append({(file, file.stat().st_mtime_ns) for file in cache.rglob("*.nb?")})
    assert written[0] == written[1]
    assert len(written[0]) == 2


# Waits for the other process before it saves, and reads the index slowly. Numba alone gives both signatures one file.
SAVES = """
import sys, time
from pathlib import Path
import numpy as np
from numba.core.caching import IndexDataCacheFile
from engine_ext import compiled
from engine_ext.plan.buckets import bucket_of

save, load = compiled._Cache.save_overload, IndexDataCacheFile._load_index

def save_together(*given):
    Path(sys.argv[1]).touch()
    end = time.monotonic() + 60
    while time.monotonic() < end and len(list(Path().glob("int*"))) < 2:
        time.sleep(0.01)
    save(*given)

def load_slowly(index):
    found = load(index)
    time.sleep(0.5)
    return found

compiled._Cache.save_overload, IndexDataCacheFile._load_index = save_together, load_slowly
print(bucket_of(getattr(np, sys.argv[1])(20)))
"""


def test_two_processes_that_compile_at_once_do_not_mix_their_code(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fresh = {**os.environ, "PYTHONPATH": str(ENGINE_EXT.parent), "NUMBA_CACHE_DIR": str(cache)}
    processes = [
        subprocess.Popen([sys.executable, "-c", SAVES, kind], cwd=tmp_path, env=fresh, stdout=subprocess.PIPE)
        for kind in ("int32", "int64")
    ]
    assert len({each.communicate()[0] for each in processes}) == 1
    assert [each.returncode for each in processes] == [0, 0]
    assert len(list(cache.rglob("*.nbc"))) == 2


def test_a_class_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    """Numba's index names the classes of arguments, and cannot be read where one has another name since."""
    package = tmp_path / "engine_ext"
    (package / "plan").mkdir(parents=True)
    shutil.copy(ENGINE_EXT / "compiled.py", package / "compiled.py")
    (package / "__init__.py").touch()
    (package / "plan/__init__.py").touch()
    source = (
        "from typing import NamedTuple\n"
        "from engine_ext.compiled import compiled\n\n\n"
        "class Before(NamedTuple):\n    number: int\n\n\n"
        "@compiled\ndef ask(given: Before) -> int:\n    return given.number\n\n\n"
        "print(ask(Before(3)))\n"
    )
    fresh = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", "import engine_ext.plan.asks"]
    for name in ("Before", "After"):
        (package / "plan/asks.py").write_text(source.replace("Before", name))
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=fresh)
        assert (ran.stdout, ran.returncode) == ("3\n", 0), ran.stderr


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "from engine_ext.plan.buckets import bucket_of\n"
        "print(bucket_of(20))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ENGINE_EXT.parent)}
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == "1"


def test_only_our_own_old_machine_code_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have the same NUMBA_CACHE_DIR."""
    folders = {name: tmp_path / name for name in ("theirs", "0000aaaa", "0000bbbb", "0000cccc", "0000dddd")}
    for folder in folders.values():
        folder.mkdir()
    for name in ("0000aaaa", "0000bbbb", "0000cccc", "theirs"):
        (folders[name] / "compiled-00000000").touch()
        os.utime(folders[name] / "compiled-00000000", (0, 0))
    os.utime(folders["0000bbbb"] / "compiled-00000000")  # somebody has used it
    os.utime(folders["0000dddd"])  # compiled by tests, without a mark
    (tmp_path / "0000eeee").mkdir()
    os.utime(tmp_path / "0000eeee", (0, 0))
    monkeypatch.setattr(warm_up, "FOLDER", folders["0000cccc"])
    warm_up.forget_old_sources()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0000bbbb", "0000cccc", "0000dddd", "theirs"]
