"""Measure how late a worker's event loop is while slices start: `python -m benchmarks.loop_lag [--requests N]`.

It starts `batchweave up` in a temporary folder with an emulated H200 in real time, runs one batch of SYNTHETIC prompts
(pieces of the demo's corpus) with short answers, so that slices start all the time, and reads the worker's histogram
`batchweave_loop_lag_seconds`. No answer is real; rendering, tokenizing, leases and storage are.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from service.demo.prompts import CHAT, corpus
from service.demo.tiny import NAME

START_S, RUN_S = 600.0, 600.0
METRIC = "batchweave_loop_lag_seconds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8_000, help="requests of the batch (default: 8,000)")
    parser.add_argument("--words", type=int, default=400, help="words of each prompt (default: 400)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchweave-lag-") as name:
        port, metrics_port = free_port(), free_port()
        command = [sys.executable, "-m", "batchweave", "up", "--data-dir", f"{name}/data", "--port", str(port)]
        command += ["--model", "tiny"]
        variables = {
            "BATCHWEAVE_EMULATED_DEVICE": "no answer is real",
            "BATCHWEAVE_GPU": "h200",
            "BATCHWEAVE_METRICS_PORT": str(metrics_port),
        }
        process = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=20)
            _until_ready(port)
            before = _buckets(metrics_port)
            began = time.monotonic()
            _run(client, Path(name) / "requests.jsonl", given.requests, given.words)
            seconds = time.monotonic() - began
            after = _buckets(metrics_port)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    _print({bound: after[bound] - before.get(bound, 0.0) for bound in after}, given.requests / seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _until_ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).json().get("workers") == 1:
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.5)
    raise SystemExit("the engine did not start")


def _run(client: openai.OpenAI, path: Path, requests: int, words: int) -> None:
    text, generator = " ".join(corpus()).split(), random.Random(1)
    with path.open("w") as file:
        for number in range(requests):
            begin = generator.randrange(max(1, len(text) - words))
            content = f"{number} {' '.join(text[begin : begin + words])}"
            body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
            line = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")
    uploaded = client.files.create(file=path, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
    deadline = time.monotonic() + RUN_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() > deadline:
            raise SystemExit(f"the batch did not end: {batch}")
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    if batch.request_counts is None or batch.request_counts.completed != requests:
        raise SystemExit(f"not every request has an answer: {batch}")


def _buckets(port: int) -> dict[float, float]:
    """Return how many measurements are at most each bound, in seconds."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name == METRIC:
            for sample in family.samples:
                if sample.name == f"{METRIC}_bucket":
                    found[float(sample.labels["le"])] = sample.value
    return found


def _print(at_most: dict[float, float], per_second: float) -> None:
    total = at_most[float("inf")]
    print(f"{total:.0f} measurements while the batch ran, {per_second:.0f} requests/s")
    for bound, count in sorted(at_most.items()):
        print(f"  at most {1000 * bound:>6.1f} ms: {100 * count / total:6.2f}%")


if __name__ == "__main__":
    main()
