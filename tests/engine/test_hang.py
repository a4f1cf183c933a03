"""A request that hangs the scheduler of a real SGLang: engine and worker die soon, so that others take over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from tests.processes import words_of

CODE = """
import asyncio, sys, time
from engine_ext.plugin.worker.host import EngineHost
from engine_ext.plugin.options import Options
from service.estimates.model_costs import planning_costs

model = sys.argv[1]
host = EngineHost(model, "m", {}, Options(planning_costs(model, "h200", 1)), step_limit_s=3.0)

async def main():
    await host.start()
    body = {"model": "m", "prompt": "x", "max_tokens": 4}
    assert (await host.run("/v1/completions", body, "good", "k")).status_code == 200
    print("answered", flush=True)
    bad = {**body, "max_tokens": 200, "ignore_eos": True, "stop_regex": "(?s)(?:(?:(?:.)+)+)+" + chr(92) + "x00"}
    sys.stdin.readline()
    await host.run("/v1/completions", bad, "bad", "k")

asyncio.run(main())
"""


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_with_its_worker(tmp_path: Path) -> None:
    model = ensure_tiny_model(tmp_path / "demo", corpus())
    command = [sys.executable, "-c", CODE, str(model)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = ""
    while "answered" not in said:
        said = process.stdout.readline()
        assert said, "the engine did not start"
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("scheduler" in words_of(each) for each in children)
    print("now the bad one", file=process.stdin, flush=True)
    try:
        assert process.wait(120) == -signal.SIGKILL
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_detokenizer_that_dies_ends_the_worker_soon(tmp_path: Path) -> None:
    """SGLang looks for a minute into what is left of its processes before it says so, unless it is told not to."""
    model = ensure_tiny_model(tmp_path / "demo", corpus())
    code = CODE.partition("    bad =")[0] + "    await asyncio.sleep(600)\n\nasyncio.run(main())\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        said = ""
        while "answered" not in said:
            said = process.stdout.readline()
            assert said, "the engine did not start"
        children = psutil.Process(process.pid).children(recursive=True)
        [detokenizer] = [each for each in children if "detokenizer" in words_of(each)]
        detokenizer.kill()
        assert process.wait(50) != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
