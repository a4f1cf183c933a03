"""Prints what the process of a comparison does, and copies its files: eight at most, and none of them large."""

import lzma
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import pictures
from benchmarks.gpu.records import ASKED, BEGINS, CALIBRATION, OVERLAP, ROWS, STAGES, STEPS, Folder

PID = "pid"
LOOKS_S = 0.5
STARTS_S = 60.0  # for a process to say that it works in the folder
MOST_BYTES = 16 * 2**20 - 1
AS_THEY_ARE = (STAGES, ROWS, CALIBRATION, OVERLAP, ASKED)
LOG, MEASURED, TRITON = "logs.tar.xz", f"{STEPS}.xz", "triton-cache.tar.xz"


def follow(folder: Folder, seconds: float, to: Path | None = None) -> None:
    """Print each stage as it begins and ends, until its process has ended or the time is over.

    `to`: where the files are copied; the small ones after each stage too, in case this process is killed.
    """
    began = time.monotonic()
    ends, shown = began + seconds, 0
    while True:
        is_starting = not (folder.path / PID).exists() and time.monotonic() < began + STARTS_S
        is_alive = alive(folder) or is_starting
        stages = folder.stages
        for stage in stages[shown:]:
            print(described(stage), flush=True)
        if to is not None and len(stages) > shown:
            _copy_small(folder, to)
        shown = len(stages)
        if not is_alive or time.monotonic() > ends:
            print("it has ended" if not is_alive else "it runs on; follow it again", flush=True)
            break
        time.sleep(LOOKS_S)
    if to is not None:
        copy(folder, to)


def alive(folder: Folder) -> bool:
    """Return whether the process that this folder names runs."""
    file = folder.path / PID
    try:
        return Path(f"/proc/{int(file.read_text())}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def mark(folder: Folder) -> None:
    """Let this process be the one that the folder names."""
    part = folder.path / f"{PID}.part"
    part.write_text(str(os.getpid()))
    part.replace(folder.path / PID)


def is_taken(folder: Folder) -> bool:
    """Return whether another process works in the folder."""
    return alive(folder) and int((folder.path / PID).read_text()) != os.getpid()


def described(stage: dict[str, Any]) -> str:
    clock = stage["time"][-8:]
    if stage["event"] == BEGINS:
        return f"{clock} {stage['stage']}: begins, at most {stage['limit_s']:.0f} s"
    found = {name: each for name, each in stage.items() if name not in ("stage", "event", "time", "at", "seconds")}
    return f"{clock} {stage['stage']}: {stage['seconds']:.1f} s, {found}"


def copy(folder: Folder, to: Path) -> None:
    """Copy at most eight files, each below 16 MiB; say which one was too large."""
    _copy_small(folder, to)
    measured = folder.path / f"measured-{STEPS}"
    if measured.exists():
        (to / MEASURED).write_bytes(lzma.compress(measured.read_bytes(), preset=3))
    with tarfile.open(to / LOG, "w:xz", preset=3) as archive:
        for log in sorted(folder.path.glob("*.log")):
            archive.add(log, log.name)
    cache = os.environ.get("TRITON_CACHE_DIR")
    if cache and Path(cache).is_dir():  # the next machine need not compile what this one has
        try:
            with tarfile.open(to / TRITON, "w:xz", preset=1) as archive:
                archive.add(cache, ".")
        except OSError:  # a file of it was renamed meanwhile
            (to / TRITON).unlink(missing_ok=True)
    for file in sorted(to.iterdir()):
        if file.stat().st_size > MOST_BYTES:
            print(f"{file.name} has {file.stat().st_size >> 20} MiB and stays behind", flush=True)
            file.unlink()


def _copy_small(folder: Folder, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for name in AS_THEY_ARE:
        if (folder.path / name).exists():
            shutil.copyfile(folder.path / name, to / name)


def summary(folder: Folder, draws: bool) -> str:
    """Return the table of the rows, and the paths of their pictures if there is time to draw them."""
    rows = folder.rows
    drawn = pictures.draw(rows, folder.path / ROWS) if draws else []
    return "\n".join([pictures.table(rows), *map(str, drawn)]) if rows else "no rows"
