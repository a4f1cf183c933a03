"""Make the requests on which policies are compared: from real lengths and prefixes, or from a user's own file."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import mixes
from benchmarks.emulated import TIMES, tokens_of
from benchmarks.traces import Row
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import Work, prepare

CAP = 2048  # tokens of an answer: longer ones would be most of a short run
SCALE = 0.1  # of the mixes: more requests than a run has
FAMILY = 16  # requests at most; larger groups are thinned out
PREPARED = 6000  # requests of a mix in a pack
LATENCY = 0.25  # of a run: what its longest answer takes if each step only reads the weights
FEWEST = 32  # requests of a run, if there are so many
DEFAULT_TOKENS = 512  # of an answer, where a request of a user's file does not say


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one run; `work`: all of them, for the bounds; `sorted_order`: depth first in the prefix tree.

    `more`: requests of the same mix that are not in the run.
    """

    prompts: list[list[int]]
    outputs: list[int]
    work: Work
    sorted_order: list[int]
    more: list[tuple[list[int], int]]


def rows_of(data: Path, name: str) -> list[Row]:
    """Read the rows that a pack has, or make them from traces."""
    path = _path(data, name)
    if not path.exists():
        if not (data / "lengths").is_dir():
            raise ValueError(f"{data} has neither {path.name} nor the traces to make it")
        return families(mixes.make(data, name, SCALE * TIMES.get(name, 1.0), 0))
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    return [Row([(part, size) for part, size in line["segments"]], line["output_tokens"], name) for line in lines]


def families(rows: list[Row]) -> list[Row]:
    """Put small groups of requests that share most of their prompts together, so that a cut keeps what they share."""
    members = defaultdict[str, list[Row]](list)
    for row in rows:
        members[_longest(row)].append(row)
    found: list[Row] = []
    for row in rows:
        family = members[_longest(row)]
        if len(family) > FAMILY:
            found.append(row)
        elif row is family[0]:
            found += family
    return found


def _longest(row: Row) -> str:
    return max(row.segments, key=lambda segment: segment[1])[0]


def write(data: Path, names: list[str], folder: Path) -> None:
    """Write workload files for a machine that has no traces."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        mixes.write(rows_of(data, name)[:PREPARED], _path(folder, name))


def read(data: Path, name: str, cost: CostModel, seconds: float, more: int = 0) -> Workload:
    """Return as many of a mix's requests as take so many seconds at the bound, in random order.

    `more`: how many others to return too.
    """
    rows = rows_of(data, name)
    most = min(CAP, max(1, int(LATENCY * seconds / cost.weights_s)))
    outputs = [min(row.output_tokens, most) for row in rows]

    def prompts(some: Iterable[int]) -> Prompts:
        return Prompts.of_segments(rows[k].segments for k in some)

    count = _count(lambda count: prompts(range(count)), outputs, cost, seconds)
    order = np.random.default_rng(0).permutation(count).tolist()
    work = _work(prompts(order), [outputs[k] for k in order], cost)
    order += range(count, min(len(rows), count + more))
    return _workload(tokens_of(rows[k].segments for k in order), [outputs[k] for k in order], work)


def of_file(path: Path, source: str, cost: CostModel, seconds: float) -> Workload:
    """Return the first requests of a user's file, as many as take so many seconds at the bound.

    Of a request only the prompt and `max_tokens` (or DEFAULT_TOKENS) count, since how long its answer gets is known
    only when it has ended. Raises ValueError, which names the line.
    """
    from service.objects.request_output import asked_output
    from service.requests.tokens import PromptTokens

    encoder, prompts, outputs = PromptTokens.load(source), list[list[int]](), list[int]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            request: dict[str, Any] = json.loads(line)
            endpoint, body = request.get("url", "/v1/chat/completions"), request["body"]
            prompts.append(list(encoder.encode(endpoint, [body])[0].ids))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a request of a batch: {error!r}") from error
        outputs.append(asked_output(endpoint, body).most or DEFAULT_TOKENS)
    if not prompts:
        raise ValueError(f"{path} has no requests")
    count = _count(lambda count: Prompts.of(prompts[:count]), outputs, cost, seconds)
    return _workload(prompts, outputs, _work(Prompts.of(prompts[:count]), outputs[:count], cost))


def _count(make: Callable[[int], Prompts], outputs: list[int], cost: CostModel, seconds: float) -> int:
    """Return how many of the first requests take so many seconds at the bound, to about 2%; or all."""

    def takes(count: int) -> float:
        return bound_s(_work(make(count), outputs[:count], cost), cost)

    low, high = 0, min(FEWEST, len(outputs))
    while takes(high) < seconds and high < len(outputs):
        low, high = high, min(2 * high, len(outputs))
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) < seconds else (low, middle)
    return high


def _work(prompts: Prompts, outputs: list[int], cost: CostModel) -> Work:
    return prepare(prompts, np.array(outputs), cost, np.full(len(outputs), LONGEST), sample=1.0)


def bound_s(work: Work, cost: CostModel) -> float:
    """Return the seconds that the work takes on an ideal engine, which overlaps GEMM and reads."""
    return work.practical_s(EngineModel.of_steps(cost, Clock.OVERLAPPED))


def _workload(prompts: list[list[int]], outputs: list[int], work: Work) -> Workload:
    count = len(work.output)
    more = list(zip(prompts[count:], outputs[count:], strict=False))
    return Workload(prompts[:count], outputs[:count], work, work.tree.order.tolist(), more)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.mix.jsonl"
