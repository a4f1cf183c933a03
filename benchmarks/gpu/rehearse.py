"""Rehearse the comparison of a lent machine on this one, in an empty folder: the device is emulated, all else is real.

python -m benchmarks.gpu.rehearse PACK [--python PYTHON3.12] [--slower 3] [--seconds 4] [--stages A,B]

It unpacks PACK (of benchmarks.gpu.pack) and starts the comparison; kills all its processes in the middle of a stage;
continues with a time that is too short, which must end within 10 s of it; and continues to the end. Each stage that
needs no CUDA must end once without a failure, and at most eight files may come back, each below 16 MiB. PYTHON must
have the packages that benchmarks/gpu/pack.py names in PRESENT.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.gpu.follow import MOST_BYTES, PID
from benchmarks.gpu.pack import ROOT, repository
from benchmarks.gpu.plan import ANOTHER
from benchmarks.gpu.records import BEGINS, ENDS, Folder

NEED_CUDA = ("kernels", "overlap")
MOST_FILES = 8
CUT_S = 52.0  # the time that is too short: an engine starts, and some stages run
LIMIT_S = 900  # for anything to happen


class Rehearsal:
    def __init__(self, folder: Path, pack: Path, python: str, options: list[str]) -> None:
        self._tree, self._lease, self.output = folder / "tree", folder / "lease", folder / "output"
        self._environment = {**os.environ, "LEASE": str(self._lease), "PYTHON": python}
        self._command, self._options = ["sh", "benchmarks/gpu/lease.sh", str(pack), str(self.output)], options
        for file in repository():
            target = self._tree / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        self.records = Folder(self._lease / "results")

    def begin(self, seconds: int, minutes: float) -> "subprocess.Popen[bytes]":
        """Start or continue the comparison for so many minutes, and follow it for so many seconds."""
        command = [*self._command, str(seconds), *self._options, "--minutes", str(minutes)]
        return subprocess.Popen(command, cwd=self._tree, env=self._environment)

    def kill(self) -> None:
        """Kill every process of the comparison, as a machine that is lost does."""
        while processes := list(self._processes()):
            for process in processes:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=10)

    @property
    def pid(self) -> str:
        """The id of the process that works there, or did."""
        file = self.records.path / PID
        return file.read_text().strip() if file.exists() else ""

    def is_alive(self) -> bool:
        return any(True for _ in self._processes())

    def _processes(self) -> "list[psutil.Process]":
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("LEASE") == str(self._lease) and process.pid != os.getpid()
                if is_ours and process.status() != psutil.STATUS_ZOMBIE and "--follow" not in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found


def until(is_so: Callable[[], bool], what: str, follower: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > ends or (follower.poll() is not None and not is_so()):
            sys.exit(f"{what}: not within {LIMIT_S:.0f} s, or the comparison has ended before")
        time.sleep(0.2)


def rehearse(rehearsal: Rehearsal, killed_in: str, late_s: float) -> None:
    records = rehearsal.records

    def begun(name: str) -> bool:
        return any(each["stage"] == name and each["event"] == BEGINS for each in records.stages)

    print(f"1. from nothing, until {killed_in} has begun; then all is killed", flush=True)
    following = rehearsal.begin(LIMIT_S, 60)
    until(lambda: begun(killed_in), killed_in, following)
    time.sleep(1.0)
    rehearsal.kill()
    following.wait(60)

    print(f"2. continued with only {CUT_S:.0f} s", flush=True)
    pid = rehearsal.pid
    following = rehearsal.begin(LIMIT_S, CUT_S / 60)
    until(
        lambda: (records.path / PID).exists() and (records.path / PID).read_text() != pid, "a second process", following
    )
    began = time.monotonic()
    until(lambda: not rehearsal.is_alive(), "its end", following)
    took = time.monotonic() - began
    following.wait(60)
    print(f"   it ended after {took:.1f} s", flush=True)
    if took > CUT_S + late_s:
        sys.exit(f"that is {took - CUT_S:.1f} s late")

    print("3. continued to the end", flush=True)
    following = rehearsal.begin(LIMIT_S, 60)
    following.wait(LIMIT_S)
    check(rehearsal)


def check(rehearsal: Rehearsal) -> None:
    stages = [each for each in rehearsal.records.stages if each["event"] == ENDS and not each.get("cut")]
    twice = [
        name
        for name, times in Counter(each["stage"] for each in stages).items()
        if times > 1 and not name.startswith(ANOTHER)
    ]
    failed = {each["stage"]: each["failed"] for each in stages if "failed" in each and each["stage"] not in NEED_CUDA}
    files = [path for path in rehearsal.output.iterdir() if path.is_file()]
    large = [path.name for path in files if path.stat().st_size > MOST_BYTES]
    print(f"{len(stages)} stages ended, {len(rehearsal.records.rows)} rows, {len(files)} files came back", flush=True)
    if failed or twice or large or len(files) > MOST_FILES or not rehearsal.records.rows:
        sys.exit(f"failed: {failed}; ended twice: {twice}; too large: {large}; files: {len(files)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--slower", type=float, default=3.0, help="than an H100 (default 3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run at the bound (default 4)")
    parser.add_argument("--stages", default="")
    parser.add_argument("--killed-in", default="h200-1 fcfs", help="the stage in which all is killed")
    parser.add_argument("--late", type=float, default=10.0, help="seconds that the end may be late (default 10)")
    given = parser.parse_args()
    options = ["--emulated", str(given.slower), "--seconds", str(given.seconds), "--stages", given.stages]
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = Rehearsal(Path(folder), given.pack.resolve(), given.python, options)
        try:
            rehearse(rehearsal, given.killed_in, given.late)
        finally:
            rehearsal.kill()
    print("rehearsed")


if __name__ == "__main__":
    main()
