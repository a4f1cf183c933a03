"""Says what another value of a number in a room's tuning.py does to whole runs of the simulated engine.

    python -m benchmarks.tuning DATA scan.HEADS=1 scan.MOST_RIGHT=1.0 plan.HASTE=10 [--mixes a100-1,h200-2]
        [--scale 1] [--clock overlapped]

Each value compiles all loops that use it, for some minutes. Prints a line for each: the seconds of each mix over those
with the numbers as they stand, without the time that planning took, and the answers that were retracted.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIXES = ("a100-1", "a100-3", "h200-2", "h200-4", "documents", "sharegpt")
REQUESTS = {"a": 0.25, "h": 0.05, "d": 0.5, "s": 1.0}  # the scale of mixes, by their first letter: seconds each


def measure(data: Path, setting: str, names: list[str], scale: float, clock: str) -> dict[str, tuple[float, int]]:
    """Return the seconds and retractions of each mix with this number set; call it before anything is compiled."""
    if setting:
        name, value = setting.split("=")
        room, name = name.split(".")
        tuning = importlib.import_module(f"engine_ext.{room}.tuning")
        setattr(tuning, name, type(getattr(tuning, name))(float(value)))
    from benchmarks.evaluation import Case, run

    found: dict[str, tuple[float, int]] = {}
    for mix in names:
        gpu = "h200" if mix.startswith("h200") else "a100-80gb"
        requests = scale * REQUESTS[mix[0]]
        case = Case("tuning", mix, ("batchweave",), requests, gpu=gpu, clock=clock, foretold=False)
        [row] = run(data, case)
        found[mix] = row["seconds"] - row["planner_s"], row["retractions"]
    return found


def _in_a_process(given: argparse.Namespace, setting: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tuning", str(given.data), setting, "--child"]
    command += ["--mixes", given.mixes, "--scale", str(given.scale), "--clock", given.clock]
    with tempfile.TemporaryDirectory() as folder:
        # Machine code is cached by its sources, which do not show the number.
        cache = {"NUMBA_CACHE_DIR": folder} if setting else {}
        done = subprocess.run(command, env={**os.environ, **cache}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("settings", nargs="+", help="room.NAME=VALUE")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual requests")
    parser.add_argument("--clock", default="overlapped", choices=("overlapped", "mixed", "sequential"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        found = measure(given.data, given.settings[0], given.mixes.split(","), given.scale, given.clock)
        print(json.dumps(found))
        return
    usual = _in_a_process(given, "")
    for setting in given.settings:
        found = _in_a_process(given, setting)
        said = (f"{mix} {seconds / usual[mix][0]:.4f} ({lost})" for mix, (seconds, lost) in found.items())
        print(f"{setting}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
