"""Defines what the comparison runs, and its command line."""

import argparse
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulated import MIXES, SCALE
from benchmarks.gpu import pictures
from benchmarks.gpu.shapes import SHAPES
from benchmarks.mixes import MIXES as ALL_MIXES
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.platform_entry import machine_name
from engine_ext.plugin.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Run:
    """How one policy runs.

    `overlap`: of the engine; an engine with mixed chunks also runs policies without them. `is_sorted`: requests are
    sent sorted depth first.
    """

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
    "batchweave-nano": Run(Tuning(), Overlap.NANO),
    "batchweave-pdmux": Run(Tuning(mixed=False), Overlap.PDMUX),
}


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/, or one from --prepare")
    found.add_argument("--mixes", default=",".join(MIXES))
    found.add_argument("--policies", default=",".join(RUNS))
    found.add_argument("--attention", default="triton", help="SGLang's attention backends to compare, as triton,fa3")
    found.add_argument("--scale", type=float, default=SCALE, help=f"share of the mixes' requests (default {SCALE})")
    found.add_argument("--gpu", default="", help="GPU whose datasheet is used before calibration (default: by name)")
    found.add_argument("--model", default="llama-3-8b", choices=list(SHAPES))
    found.add_argument("--engine-args", type=json.loads, default={}, help="more server arguments for SGLang, as JSON")
    found.add_argument("--output", type=Path, default=Path("results/gpu.jsonl"), help="adds rows; existing ones stay")
    found.add_argument("--minutes", type=float, default=1e6, help="minutes after which no further run starts")
    found.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return found


def read(given_to: argparse.ArgumentParser) -> argparse.Namespace:
    given = given_to.parse_args()
    given.until = given.until or time.time() + 60 * given.minutes
    if not given.scale > 0:
        given_to.error("--scale must be above 0")
    if not given.data.is_dir():
        given_to.error(f"{given.data} is not a folder; docs/gpu.md says what it must contain")
    if not isinstance(given.engine_args, dict):
        given_to.error("--engine-args must be a JSON object")
    given.gpu = given.gpu or ("h100" if "H100" in machine_name() else "h200")
    for name, known in (("mixes", ALL_MIXES), ("policies", RUNS)):
        values = getattr(given, name).split(",")
        for value in values:
            if value not in known:
                given_to.error(f"--{name}: unknown {value!r}; must be one of {', '.join(known)}")
        setattr(given, name, values)
    return given


def identity(given: argparse.Namespace, attention: str) -> dict[str, Any]:
    """Return the fields that rows must have in common to be compared."""
    return {
        "machine": machine_name(),
        "model": given.model,
        "attention": attention,
        "scale": given.scale,
        "engine_args": given.engine_args,
    }


def missing(given: argparse.Namespace, attention: str) -> list[tuple[str, str]]:
    """Return (mix, policy) of each run that has no row in the output yet."""
    same = identity(given, attention).items()
    done = {(row["mix"], row["policy"]) for row in pictures.read(given.output) if same <= row.items()}
    return [(mix, policy) for mix in given.mixes for policy in given.policies if (mix, policy) not in done]


def calibration_path(given: argparse.Namespace, attention: str) -> Path:
    same = identity(given, attention) | {"scale": None}
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:8]
    return given.output.with_name(f"{given.output.stem}-{given.model}-{attention}-{digest}.calibration.json")
