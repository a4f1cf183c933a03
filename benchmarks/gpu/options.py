"""What the comparison runs, and its command line."""

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulated import MIXES, SCALE
from benchmarks.gpu import pictures
from benchmarks.gpu.shapes import SHAPES
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.retune import Tuning


@dataclass(frozen=True, slots=True)
class Run:
    """`overlap`: of the engine; one with mixed chunks runs without them too. `is_sorted`: depth first beforehand."""

    tuning: Tuning
    overlap: Overlap = Overlap.MIXED
    is_sorted: bool = False


RUNS = {
    "fcfs": Run(Tuning("fcfs", mixed=False)),
    "lpm": Run(Tuning("lpm", mixed=False)),
    "dfs-weight": Run(Tuning("dfs-weight", mixed=False)),
    "dfs-2048": Run(Tuning("fcfs", chunk=2048, mixed=False), is_sorted=True),
    "dfs-8192": Run(Tuning("fcfs", mixed=False), is_sorted=True),
    "dfs-2048-mixed": Run(Tuning("fcfs", chunk=2048), is_sorted=True),
    "dfs-8192-mixed": Run(Tuning("fcfs"), is_sorted=True),
    "batchweave-none": Run(Tuning(mixed=False)),
    "batchweave-mixed": Run(Tuning()),
    "batchweave-pdmux": Run(Tuning(mixed=False), Overlap.PDMUX),
}


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/, or what --prepare wrote")
    found.add_argument("--mixes", default=",".join(MIXES))
    found.add_argument("--policies", default=",".join(RUNS))
    found.add_argument("--attention", default="triton", help="SGLang's attention backends, side by side: triton,fa3")
    found.add_argument("--scale", type=float, default=SCALE, help=f"share of the mixes' requests (default {SCALE})")
    found.add_argument("--gpu", default="h200", help="its datasheet's peaks, before calibration (default h200)")
    found.add_argument("--model", default="llama-3-8b", choices=list(SHAPES))
    found.add_argument("--engine-args", type=json.loads, default={}, help="more server arguments for SGLang, as JSON")
    found.add_argument("--output", type=Path, default=Path("results/gpu.jsonl"), help="rows are added; done ones stay")
    found.add_argument("--minutes", type=float, default=1e6, help="no run begins later than this after the start")
    found.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return found


def read(given_to: argparse.ArgumentParser) -> argparse.Namespace:
    given = given_to.parse_args()
    given.until = given.until or time.time() + 60 * given.minutes
    for name, known in (("mixes", None), ("policies", RUNS)):
        values = getattr(given, name).split(",")
        for value in values:
            if known is not None and value not in known:
                given_to.error(f"--{name}: no {value!r}; there are {', '.join(known)}")
        setattr(given, name, values)
    return given


def missing(given: argparse.Namespace, attention: str) -> list[tuple[str, str]]:
    """(mix, policy) of the runs that have no row in the output yet."""
    done = {(row["mix"], row["policy"], row["attention"]) for row in pictures.read(given.output)}
    return [(mix, policy) for mix in given.mixes for policy in given.policies if (mix, policy, attention) not in done]


def calibration_path(given: argparse.Namespace, attention: str) -> Path:
    return given.output.with_name(f"{given.output.stem}-{attention}.calibration.json")


def machine() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"the CPU of {platform.node()}"
