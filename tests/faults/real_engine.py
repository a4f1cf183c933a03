"""Kills on `batchweave up` with real SGLang, minutes for each: `python -m tests.faults.real_engine N [--seed S]`.

One batch; what shards hold at each fault must be in the output as it was then, line by line.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.acceptance.service import Up
from tests.acceptance.test_up import long_lines

KINDS = ("engine", "scheduler hangs", "worker", "planner", "api", "redis", "flushall", "everything")
STEP_LIMIT_S = 15
ANSWERS_BETWEEN = 100  # so that each fault meets an engine that works


def strike(up: Up, kind: str, rng: random.Random) -> None:
    family = up.family()
    if kind == "flushall":
        up.redis.flushall()
    elif kind == "everything":
        for process in family:
            process.kill()
        psutil.wait_procs(family, 20)
        assert up.process is not None
        up.process.wait(20)
        up.start()
    elif kind == "scheduler hangs":
        worker = up.worker()
        next(each for each in worker.children() if "scheduler" in " ".join(each.cmdline())).suspend()
        worker.wait(20 * STEP_LIMIT_S)  # ten times the limit for the first step of an engine
    elif kind == "engine":
        rng.choice(up.worker().children(recursive=True)).kill()
    else:
        next(each for each in family[1:] if kind in " ".join(each.cmdline())).kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    given = parser.parse_args()
    rng, happened, kept = random.Random(given.seed), Counter[str](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="batchweave-chaos-") as name:
        up = Up.on(Path(name) / "data")
        up.variables["BATCHWEAVE_STEP_LIMIT_S"] = str(STEP_LIMIT_S)
        up.start()
        try:
            up.until_engine()
            started = time.monotonic()
            batch_id = up.submit(long_lines("id", given.requests))
            for _ in range(given.faults):
                wanted = min(up.done(batch_id) + ANSWERS_BETWEEN, given.requests)
                up.until(lambda: up.done(batch_id) >= wanted, "answers", timeout_s=600)  # noqa: B023
                kind = rng.choice(KINDS)
                before = up.answers_on_disk()
                assert before.items() >= kept.items(), "an answer that was durable is gone, or another"
                kept = before
                strike(up, kind, rng)
                happened[kind] += 1
                print(f"{time.monotonic() - started:5.0f} s: {kind}, {len(kept)} answers durable", flush=True)
            up.until(lambda: up.client.batches.retrieve(batch_id).status == "completed", "the end", timeout_s=1200)
            batch = up.client.batches.retrieve(batch_id)
            output = {custom_id: line["id"] for custom_id, line in up.lines(batch.output_file_id).items()}
            assert set(output) == {f"id-{n}" for n in range(given.requests)}
            assert batch.error_file_id is None
            assert output.items() >= kept.items(), "an answer that was durable is another now"
            assert batch.usage is not None
            assert batch.usage.output_tokens == 60 * given.requests
        finally:
            up.stop()
    print(f"{given.faults} faults on one batch of {given.requests} requests in {time.monotonic() - started:.0f} s,")
    print(f"seed {given.seed}: {dict(happened)}; {len(kept)} answers were durable before the last and are unchanged")


if __name__ == "__main__":
    main()
