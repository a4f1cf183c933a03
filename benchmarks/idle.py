"""Measure what an idle service costs, and how soon it answers a new batch: `python -m benchmarks.idle [--seconds N]`.

It starts `batchweave up` with the demo's model in a temporary folder, lets it rest, and reads from /proc how much CPU
each of its processes used. Then it sends batches of one request and prints how long each took from its creation until
its answer was on disk. Finally it stops the service in the middle of a batch. It needs no GPU; a GPU's driver may add a
little.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import psutil

from service.demo.prompts import CHAT
from service.demo.tiny import NAME

BATCHES, IN_FLIGHT = 5, 500
START_S, REST_S = 600.0, 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to count CPU time (default: 60)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchweave-idle-") as name:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "batchweave", "up", "--data-dir", f"{name}/data", "--port", str(port)]
        command += ["--model", "tiny"]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=20)
            _wait_for_worker(client)
            time.sleep(REST_S)
            _rest(process.pid, given.seconds)
            for _ in range(BATCHES):
                _react(client, Path(name))
            _submit(client, Path(name), IN_FLIGHT, 1000)
            time.sleep(REST_S)
        finally:
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            print(f"SIGTERM with a batch in the engine: the service exited in {time.monotonic() - began:.1f} s")


def _wait_for_worker(client: openai.OpenAI) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            found: Any = client.get("/workers", cast_to=object)
            if any(each["state"] != "starting" for each in found["data"]):
                return
        except openai.APIError:
            pass
        time.sleep(1.0)
    raise SystemExit("the engine did not start")


def _rest(pid: int, seconds: float) -> None:
    before = _cpu(pid)
    time.sleep(seconds)
    after = _cpu(pid)
    shares = {name: 100 * (cpu - before[name]) / seconds for name, cpu in after.items()}
    for name, share in sorted(shares.items(), key=lambda each: -each[1]):
        print(f"{name:<14} {share:6.2f}% of a core")
    print(f"{'all':<14} {sum(shares.values()):6.2f}% of a core, over {seconds:.0f} s without work")


def _cpu(pid: int) -> dict[str, float]:
    """Return the CPU seconds used so far, by part of the service."""
    taken: dict[str, float] = defaultdict(float)
    for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        line = each.cmdline()
        name = next((part for part in ("api", "planner", "worker", "up") if part in line), " ".join(line)[:14])
        times = each.cpu_times()
        taken[name] += times.user + times.system
    return taken


def _react(client: openai.OpenAI, folder: Path) -> None:
    """Create a batch of one request, and print how long it takes until its answer is in object storage."""
    shards = folder / "data" / "objects" / "shards"
    before = set(os.listdir(shards)) if shards.exists() else set[str]()
    started = _submit(client, folder, 1, 1)
    while not shards.exists() or set(os.listdir(shards)) <= before:
        time.sleep(0.005)
    print(f"a batch of one request: answered and on disk {time.monotonic() - started:.2f} s after its creation")
    time.sleep(2.0)


def _submit(client: openai.OpenAI, folder: Path, requests: int, max_tokens: int) -> float:
    """Create a batch of this many requests, and return when it was sent, by the monotonic clock."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(requests)]
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
    started = time.monotonic()
    client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return started


if __name__ == "__main__":
    main()
