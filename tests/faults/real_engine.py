"""Kills on `batchweave up` with real SGLang, minutes for each: `python -m tests.faults.real_engine N [--seed S]`.

One batch; what shards hold at each fault must be in the output as it was then, line by line. Beside it clients stream
answers, which are whole or end by an error event. SGLang checks after each step that no KV cache token is lost.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from service.demo.tiny import NAME
from tests.acceptance.service import Up
from tests.acceptance.test_up import long_lines
from tests.faults.streams import WHOLE, Streams
from tests.processes import words_of

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
        next(each for each in worker.children() if "scheduler" in words_of(each)).suspend()
        worker.wait(20 * STEP_LIMIT_S)  # ten times the limit for the first step of an engine
    elif kind == "engine":
        rng.choice(up.worker().children(recursive=True)).kill()
    else:
        next(each for each in family[1:] if kind in words_of(each)).kill()


def is_streamed(_content: str, chunks: list[Any], to_the_end: bool) -> bool:
    """Whether these are the chunks of an answer to its end, or up to some token."""
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    return not any(ends[:-1]) and (bool(ends) and ends[-1] == "length" if to_the_end else not any(ends))


def api_of(up: Up) -> int | None:
    """The process id of the API; None while there is none."""
    with suppress(psutil.Error):
        assert up.process is not None
        for child in psutil.Process(up.process.pid).children():
            with suppress(psutil.Error):
                if "api" in child.cmdline():
                    return child.pid
    return None


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
        up.variables["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
        more = {"max_tokens": 24, "ignore_eos": True}
        streams = Streams(up.url, NAME, lambda: api_of(up), is_streamed, given.seed, more)
        up.start()
        try:
            up.until_engine()
            started = time.monotonic()
            batch_id = up.submit(long_lines("id", given.requests))
            streams.start()
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
            streams.stop()
            assert not streams.wrong, streams.wrong
            assert streams.ended[WHOLE], streams.ended
            up.until(lambda: up.worker_state()["online_requests"] == 0, "the worker to be without online requests")
            assert batch.usage is not None
            assert batch.usage.output_tokens == 60 * given.requests
        finally:
            up.stop()
    print(f"{given.faults} faults on one batch of {given.requests} requests in {time.monotonic() - started:.0f} s,")
    print(f"streams: {dict(streams.ended)}")
    print(f"seed {given.seed}: {dict(happened)}; {len(kept)} answers were durable before the last and are unchanged")


if __name__ == "__main__":
    main()
