"""Make the requests on which policies are compared, from real lengths and prefixes."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import mixes
from benchmarks.emulated import TIMES, tokens_of
from benchmarks.traces import Row
from engine_ext.costs.cost import CostModel
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import Work, prepare

SCALE_FILE = "prepared.json"


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one mix; `work`: all of them, for the bounds; `sorted_order`: depth first in the prefix tree."""

    prompts: list[list[int]]
    outputs: list[int]
    work: Work
    sorted_order: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(self.outputs)


def rows_of(data: Path, name: str, scale: float) -> list[Row]:
    """Read the rows from a file that --prepare wrote, or make them from traces."""
    path = _path(data, name)
    if not path.exists() and (data / SCALE_FILE).exists():
        raise SystemExit(f"{data} was prepared without {name}; prepare it again with --mixes {name}")
    if not path.exists():
        return mixes.make(data, name, scale * TIMES.get(name, 1.0), 0)
    prepared = json.loads((data / SCALE_FILE).read_text())["scale"]
    if prepared != scale:
        raise SystemExit(f"{data} was prepared with --scale {prepared}, not {scale}; use --scale {prepared}")
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    return [Row([(part, size) for part, size in line["segments"]], line["output_tokens"], name) for line in lines]


def write(data: Path, names: list[str], scale: float, folder: Path) -> None:
    """Write workload files for a machine that has no traces."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCALE_FILE).write_text(json.dumps({"scale": scale}))
    for name in names:
        mixes.write(rows_of(data, name, scale), _path(folder, name))


def read(data: Path, name: str, scale: float, cost: CostModel) -> Workload:
    rows = rows_of(data, name, scale)
    outputs = [row.output_tokens for row in rows]
    prompts = Prompts.of_segments(row.segments for row in rows)
    caps = np.full(len(outputs), LONGEST)
    work = prepare(prompts, np.array(outputs), cost, caps, sample=1.0)
    return Workload(tokens_of(row.segments for row in rows), outputs, work, work.tree.order.tolist())


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.mix.jsonl"
