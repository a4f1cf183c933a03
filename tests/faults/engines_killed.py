"""Kills engines of the tests while these run: `python -m tests.faults.engines_killed [--kills 20] [--seed 1]`.

Each kill takes the scheduler of an engine, or the process that holds it, at a random moment of the engine's life. A run
of tests/engine has several engines; the runs go on until there were so many kills. In each run, every test must have a
result, each failure must name the death of an engine that was killed, and nothing else may fail. An engine that was
killed when no test used it any more fails none; how many did is printed.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path

import psutil

SCHEDULER = "sglang::sched"  # the kernel keeps 15 characters of a name
SHARE = 0.5  # of the engines that are seen
LIFE_S = 25.0  # an engine is killed so many seconds after its start at the most
NAMED = re.compile(r"the engine of process (\d+) (?:died|did not start)")


def engines(root: psutil.Process) -> dict[int, psutil.Process]:
    """Return the processes that hold engines, by their ids: those that have a scheduler, of benchmarks.engine_process.

    The rehearsal of the comparison on a GPU starts and kills engines of its own.
    """
    found: dict[int, psutil.Process] = {}
    for each in root.children(recursive=True):
        with suppress(psutil.Error, ProcessLookupError):
            parent = each.parent()
            if not each.name().startswith(SCHEDULER) or parent is None or os.getsid(parent.pid) != parent.pid:
                continue
            if any("forkserver" in word for word in parent.cmdline()):
                found[parent.pid] = parent
    return found


def kill(holder: psutil.Process, rng: random.Random) -> str | None:
    """Kill the holder of an engine or its scheduler; return which, or None if it has ended."""
    victims = {"holder": holder}
    with suppress(psutil.Error, StopIteration):
        children = holder.children()
        victims["scheduler"] = next(each for each in children if each.name().startswith(SCHEDULER))
    name = rng.choice(sorted(victims))
    try:
        victims[name].kill()
    except psutil.NoSuchProcess:
        return None
    return name


def run(rng: random.Random, folder: Path, most: int, tests: list[str]) -> tuple[dict[int, str], Path]:
    """Run the tests and kill up to `most` of their engines; return what died, by the holder's id, and the report."""
    report = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        return _kill_some(process, rng, most), report
    finally:
        process.terminate()
        process.wait()


def _kill_some(process: "subprocess.Popen[bytes]", rng: random.Random, most: int) -> dict[int, str]:
    """Kill engines of a run until it ends; return what was killed, by the holder's id."""
    due: dict[int, float | None] = {}
    killed: dict[int, str] = {}
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for pid, holder in engines(psutil.Process(process.pid)).items():
                if pid not in due:
                    due[pid] = time.monotonic() + rng.uniform(0, LIFE_S) if rng.random() < SHARE else None
                at = due[pid]
                if at is not None and time.monotonic() > at and len(killed) < most:
                    due[pid] = None
                    name = kill(holder, rng)
                    if name is not None:
                        killed[pid] = name
                        print(f"killed the {name} of process {pid}", flush=True)
        time.sleep(0.1)
    return killed


def judge(killed: dict[int, str], report: Path, wanted: int) -> list[str]:
    """Return what is wrong with a run in which these engines were killed."""
    wrong: list[str] = []
    if not report.exists():
        return ["pytest ended without a report"]
    cases, named = list(ET.parse(report).iter("testcase")), set[int]()
    if len(cases) < wanted:
        wrong.append(f"only {len(cases)} of {wanted} tests have a result")
    failed = 0
    for case in cases:
        for fault in (*case.findall("failure"), *case.findall("error")):
            failed += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            match = NAMED.search(f"{fault.get('message')} {fault.text}")
            if match is None:
                wrong.append(f"{name} failed of something else: {(fault.get('message') or '')[:200]}")
            elif int(match[1]) not in killed:
                wrong.append(f"{name} names an engine that was not killed: {match[1]}")
            else:
                named.add(int(match[1]))
    print(
        f"{len(cases)} tests, {failed} failed; engines killed {len(killed)}, named by failures {len(named)}", flush=True
    )
    unnamed = killed.keys() - named
    if unnamed:  # its last test was over, or its end had begun
        print(f"no test used {sorted(unnamed)} any more")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests/engine"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng, done, wrong = random.Random(given.seed), 0, list[str]()
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", *given.tests],
        capture_output=True,
        text=True,
    )
    wanted = sum("::" in line for line in listed.stdout.splitlines())
    if not wanted:
        sys.exit(f"no tests in {given.tests}: {listed.stdout[-1000:]}")
    while done < given.kills and not wrong:
        with tempfile.TemporaryDirectory() as folder:
            killed, report = run(rng, Path(folder), given.kills - done, given.tests)
            done += len(killed)
            wrong += judge(killed, report, wanted)
            if wrong:
                print((Path(folder) / "log").read_text(errors="replace")[-20_000:])
        if not killed:
            wrong.append("no engine was there to be killed")
    print(
        "\n".join(wrong) or f"{done} kills: only the tests of these engines failed, and each names its engine's death"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
