"""python -m engine_ext.warm_up: compiles what planner and scheduler call, once for all processes of a machine."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numba
import numpy as np

from engine_ext.compiled import FOLDER
from engine_ext.coserve.governor import Moment, is_late, note_served, served
from engine_ext.coserve.limit import NOT_PROFILED
from engine_ext.coserve.predictor import Load, predict
from engine_ext.coserve.reserve import note_online_kv, reserve
from engine_ext.coserve.slo import SloClass, least_slack
from engine_ext.coserve.tuning import REFIT
from engine_ext.coserve.victims import victims
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, compute_time, step_time
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.blend import Wishes
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import Outputs, Shape, plan_window
from engine_ext.scan.state import StepCosts
from engine_ext.scan.tuning import FEWEST_CHANGES
from engine_ext.step.decide import share
from engine_ext.step.live import LiveScan
from engine_ext.step.memory import learn, new_memory, note_launch
from engine_ext.step.view import batches_alone

FORGET_S = 30 * 24 * 3600


def is_done() -> bool:
    """Return whether these sources are compiled for this installation on this machine."""
    with suppress(OSError):  # a folder of another user
        if _mark().exists():
            with suppress(PermissionError):
                os.utime(_mark())  # it is in use, and is not forgotten
            return True
    return False


def begin() -> "subprocess.Popen[bytes] | None":
    """Start compiling in a separate process, unless it is already done, and return the process.

    Wait for the process before you call compiled functions. If another process is already compiling, the new one waits
    for it.
    """
    return None if is_done() else subprocess.Popen([sys.executable, "-m", "engine_ext.warm_up"])


def ensure() -> None:
    """Wait until everything is compiled; if compiling fails, each caller compiles for itself."""
    process = begin()
    if process is not None:
        process.wait()


def main() -> None:
    if is_done():
        return
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process compiles, the others wait for it
        if is_done():
            return
        started = time.monotonic()
        print("Compiling the loops of planner and scheduler (once, one or two minutes) …", file=sys.stderr, flush=True)
        compile_planner()
        compile_scan()
        compile_coserve()
        _mark().touch()
        forget_old_sources()
        print(f"Compiled in {time.monotonic() - started:.0f} s, cached in {FOLDER}", file=sys.stderr, flush=True)


def _mark() -> Path:
    """Return the file that exists once everything is compiled for this interpreter."""
    what = crc32("\0".join((sys.version, numba.__version__)).encode())
    return FOLDER / f"compiled-{what:08x}"


def forget_old_sources() -> None:
    """Delete machine code of other sources that has not been used for long."""
    for folder in FOLDER.parent.iterdir():
        if folder == FOLDER or not re.fullmatch("[0-9a-f]{8}", folder.name):
            continue
        marks = list(folder.glob("compiled-*")) or [folder]  # each start touches the mark of what it uses
        if all(time.time() - mark.stat().st_mtime > FORGET_S for mark in marks):
            shutil.rmtree(folder, ignore_errors=True)


def compile_planner() -> None:
    """Plan a small window with deadlines, tenants and lengths of all kinds."""
    count, generator = 48, np.random.default_rng(0)
    lengths = np.full(count, 32, dtype=np.int64)
    tokens = generator.integers(0, 1 << 17, int(lengths.sum()), np.uint32)
    tokens.reshape(count, -1)[:, :8] = np.arange(count, dtype=np.uint32)[:, None] % 3
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    caps = np.full(count, 100, dtype=np.int64)
    known = np.where(np.arange(count) % 3 == 0, caps, UNKNOWN)
    outputs = Outputs(caps, known, np.arange(count, dtype=np.int64) % 2)
    numbers = np.arange(count, dtype=np.int64)
    wishes = Wishes(np.arange(count, dtype=np.float64) * 60.0, numbers % 2, np.array([1.0, 2.0]))
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    plan_window(Prompts(tokens, starts), outputs, cost, wishes, Shape(slice_requests=8))


def compile_scan() -> None:
    """Run requests with few prefixes and all kinds of lengths through all functions that an engine calls."""
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    scan, generator = LiveScan(cost, StepCosts.of(cost, 1_000_000)), np.random.default_rng(0)
    memory = new_memory(EngineModel.of_steps(cost, Clock.MIXED).numbers, 1_000_000, NOT_PROFILED)
    running: list[int] = []
    for key in range(6 * FEWEST_CHANGES):
        prompt = generator.integers(0, 1 << 17, 64 + key % 5 * 100, np.uint32)
        prompt[:8] = key % 3
        scan.add(key, prompt, 4000, (UNKNOWN, 2, 3000)[key // 3 % 3], due=1e9 / (1 + key % 4))
        if key % FEWEST_CHANGES != 0 or len(scan) == 0:
            continue
        view = batches_alone(1000, 1000, 0, 0, slots=5)._replace(mixes=key // FEWEST_CHANGES % 2 == 1)
        _, admitted = scan.decide(memory, view, np.zeros(0, dtype=np.bool_), float(key))
        for each in admitted[1:]:
            scan.prefilled(each)
            running.append(each)
        for each in admitted[:1]:
            scan.put_back(each)
            _ = scan.next_keys
            scan.take_back(each)
        victims(scan.state)
        for change in (scan.finished, scan.retracted, scan.dropped):
            if len(running) > 1:
                change(running.pop(0), 10)
    model = EngineModel.of_steps(cost, Clock.MIXED).numbers
    step_time(model, compute_time(model, 10, 20.0), 1e-3)
    scan.add(-1, generator.integers(0, 1 << 17, 64, np.uint32), 1000)
    scan.take_back(-1)


def compile_coserve() -> None:
    """Bound a few steps beside online requests."""
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    memory = new_memory(EngineModel.of_steps(cost, Clock.MIXED).numbers, 1000, NOT_PROFILED)
    load, theirs = Load(10, 20.0, 1, 1, 100), Load(0, 0.0, 0, 1, 100)
    for _ in range(REFIT):
        learn(memory, load, theirs, 0.01)
    note_launch(memory, load, theirs)
    share(memory, batches_alone(0, 0, 0, 0), np.zeros(0, dtype=np.bool_), True)
    note_online_kv(memory.held, 10, 0.01)
    reserve(memory.held)
    bounds = SloClass(ttft_s=1.0).bounds
    times, generated = np.ones(1), np.ones(1, dtype=np.int64)
    least_slack(bounds, 0.0, times, times, times, generated)
    predict(memory.predictor, load)
    found = served(Moment(0.0, 0.0), Moment(0.5, 0.1), Moment(0.6, 0.1), 10)
    if not is_late(bounds, found.ttft_s, found.tpot_s):
        note_served(memory.governor, bounds, 0.99, found, 1.0)


if __name__ == "__main__":
    main()
