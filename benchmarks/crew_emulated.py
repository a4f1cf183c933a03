"""Measure how much faster one batch is on several engines: real SGLang on emulated H200s, through the whole service.

python -m benchmarks.crew_emulated DATA [--engines 1,8] [--requests 6000] [--slowed 20]

`batchweave up --engines N` runs it; each engine is real SGLang on an emulated H200 with Llama-3-8B's costs, in real
time, and no answer is real. The batch is MMLU's 5-shot prompts, whose answers are short, so
that its end is not one long answer. The clock of all devices is `--slowed` times slower, because a small machine cannot
schedule so many steps a second; what the service and the engines' schedulers cost is not, so it weighs more here.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.colocate import MACHINES
from benchmarks.emulated import tokens_of
from benchmarks.online_scene import LONGEST, Machines
from benchmarks.online_service import variables_of
from benchmarks.online_traffic import batch_rows
from benchmarks.traces import Row
from service.demo.tiny import NAME
from tests.acceptance.service import Up

COMPLETIONS = "/v1/completions"


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the batch's file, with prompts by token ids."""
    with path.open("w") as file:
        for number, (row, prompt) in enumerate(zip(rows, tokens_of(row.segments for row in rows), strict=True)):
            body = {"model": NAME, "prompt": prompt, "max_tokens": row.output_tokens, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
            file.write(json.dumps(line) + "\n")


def cpu_s(up: Up) -> float:
    """Return the CPU seconds of all processes of the service so far."""
    return sum(sum(each.cpu_times()[:2]) for each in up.family())


def run(path: Path, up: Up, workers: int) -> tuple[float, str]:
    """Run the file as a batch; return the seconds from its first answer's start to its end, and what to say of it."""
    client = up.client
    uploaded = client.files.create(file=path, purpose="batch")
    before_s = cpu_s(up)
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=COMPLETIONS, completion_window="24h")
    began = 0.0
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        batch = client.batches.retrieve(batch.id)
        if (
            not began
            and batch.status == "in_progress"
            and (batch.model_extra or {})["batchweave"]["waiting_for"] is None
        ):
            began = time.monotonic()
        time.sleep(0.2)
    took = time.monotonic() - began
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.completed == batch.request_counts.total, batch.request_counts
    assert batch.usage is not None
    cached = batch.usage.input_tokens_details.cached_tokens / batch.usage.input_tokens
    cores = (cpu_s(up) - before_s) / took
    return took, f"{workers} engines: {took:.1f} s, {cached:.4f} of the prompt tokens cached, {cores:.2f} cores busy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument(
        "--engines",
        default="1,8",
        help="numbers of engines, with commas; the first is what the others are compared with",
    )
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--slowed", type=float, default=20.0)
    given = parser.parse_args()
    cost, model = MACHINES["h200"].engine()
    rows = batch_rows(given.data, "mmlu", 0, LONGEST, given.requests)
    alone = None
    for workers in map(int, given.engines.split(",")):
        with tempfile.TemporaryDirectory(prefix="batchweave-crew-") as name:
            folder = Path(name)
            write(rows, folder / "batch.jsonl")
            up = Up.on(folder / "data", "--engines", str(workers))
            up.variables |= variables_of(Machines(cost, model, workers, given.slowed), "dual-scan", folder)
            del up.variables["BATCHWEAVE_SLO_FILE"]  # there are no online requests
            up.variables["BATCHWEAVE_SLICE_REQUESTS"] = "256"  # the default; tests have less
            up.start()
            try:
                up.until_engine(workers)
                took, said = run(folder / "batch.jsonl", up, workers)
            finally:
                up.stop()
        alone = alone or took
        print(f"{said}, {alone / took:.2f} times the first", flush=True)


if __name__ == "__main__":
    main()
