"""Measure what a first and a later start cost: `python -m benchmarks.start [--base COMMIT]`.

It clones this repository into a temporary folder, runs `make install` there and `make demo` twice, with no compiled
code in reach, and prints the CPU seconds of each. With --base it does the same for another commit too. Packages come
from the package manager's own cache if they are there.
"""

import argparse
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
STEPS = (("make install", ["make", "install"]), ("first make demo", ["make", "demo"]), ("later", ["make", "demo"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="another commit to measure, before this one")
    given = parser.parse_args()
    for commit in ["HEAD"] if given.base is None else [given.base, "HEAD"]:
        with tempfile.TemporaryDirectory(prefix="batchweave-start-") as name:
            measure(commit, Path(name))


def measure(commit: str, folder: Path) -> None:
    clone = folder / "clone"
    named = subprocess.run(["git", "rev-parse", commit], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    subprocess.run(["git", "checkout", "--quiet", named.stdout.strip()], cwd=clone, check=True)
    # Packages may come from a cache, but machine code may not; its compilers cache it below XDG_CACHE_HOME.
    packages = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "UV_CACHE_DIR": packages}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for name, command in STEPS:
        cpu_s, began = cpu_of_children_s(), time.monotonic()
        subprocess.run(command, cwd=clone, env=environment, check=True, stdout=subprocess.DEVNULL)
        taken_s = cpu_of_children_s() - cpu_s
        print(f"{commit:<12.12} {name:<16} {taken_s:7.1f} CPU s  {time.monotonic() - began:7.1f} s", flush=True)


def cpu_of_children_s() -> float:
    """Return the CPU seconds of children that have ended and were waited for, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
