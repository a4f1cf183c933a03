"""Reproduce BlendServe's evaluation on the simulated engine, and go beyond it; each run adds one line of JSON.

python -m benchmarks.evaluation DATA table2 [--output docs/evaluation] [--processes 2]

Suites: table2 (Figures 7, 9 and 10), small (the same with a tenth of the requests), known (both with all lengths
known), learned (the sample's answers known only as they end), remembered (learned, with the lengths of
an earlier batch), h200, twentieth (h200 with a twentieth of its requests,
and no lengths known in advance), hard (prefixes that do not fit into the KV cache), prompts (long ones, whose compute
is more than their reads), varied (lengths that vary within a prefix), others (traces and seeds not used during
development), grid, grid-sharegpt, grid-conv, grid-m-mid (Figures 11 and 13 to 15), machines (Figure 12),
replicas (Table 3), clocks, sensitivity.
`python -m benchmarks.pictures docs/evaluation` draws the results.
"""

import argparse
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import mixes
from benchmarks.simulate import warm_up as compile_simulator
from benchmarks.simulate.batches import simulate
from engine_ext import warm_up
from engine_ext.arrays import Column
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import INTERFERENCE, Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.lengths import Estimates
from engine_ext.plan.memory import BEGINNING, KIND, Keys, Recall, learn, recall
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tuning import KEEP_SHARING, SAMPLE
from engine_ext.plan.window import Outputs, Shape, plan_window
from engine_ext.simulate.policies import Outcome, Search, Work, prepare
from service.estimates.length_memory import MOST_PROFILES

MAIN = ("dfs", "random", "decode-heavy", "sorted-f", "blendserve", "batchweave")
ALL = ("fcfs", "lpm", "dfs-weight", "dfs", "random", "lof", "decode-heavy", "sorted-f", "blendserve", "batchweave")
FOUR = ("a100-1", "a100-2", "a100-3", "a100-4")
HARD = ("documents", "mooncake")
LARGE = 3.43  # times Table 2's requests: 430,000 for the first mix
EARLIER = 1000  # added to the seed of a run: the seed of the batch before it
SERIES = 120  # points of Figure 10's lines


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one machine, run with some policies.

    `shape`: density and sharing in place of a named mix. `windows`: how many windows the requests are cut into, in the
    order in which they came; the windows run one after the other. `chunk`: the only chunk size, or 0 to search.
    `length_error`: all lengths are given in advance, each wrong by a factor whose logarithm has this standard
    deviation. `foretold`: the sample's answers are known before the run; otherwise ours learns them only when they have
    ended. `remembered`: ours remembers the lengths of another draw of the mix.
    """

    suite: str
    mix: str
    policies: tuple[str, ...] = MAIN
    scale: float = 1.0
    seed: int = 0
    model: str = "llama-3-8b"
    gpu: str = "a100-80gb"
    tp: int = 1
    clock: str = "overlapped"
    sample: float = SAMPLE
    interference: float = INTERFERENCE
    shape: tuple[float, float] | None = None
    replicas: int = 1
    windows: int = 1
    chunk: int = 0
    keep: float = KEEP_SHARING
    length_error: float = 0.0
    foretold: bool = True
    remembered: bool = False
    series: bool = False


def run(data: Path, case: Case) -> list[dict[str, Any]]:
    """Run all policies of a case, and return a row for each."""
    cost = CostModel(preset(case.model), Machine(hardware(case.gpu), tp=case.tp))
    rows = _rows(data, case, cost)
    engine = EngineModel.of(cost, Clock[case.clock.upper()], case.interference)
    fits = [row for row in rows if sum(size for _, size in row.segments) + row.output_tokens < engine.capacity]
    prompts = Prompts.of_segments(row.segments for row in fits)
    output = np.array([row.output_tokens for row in fits], dtype=np.int64)
    if case.replicas > 1:
        return list(_replicated(case, prompts, output, cost, engine))
    if case.windows > 1:
        return list(_windowed(case, prompts, output, cost, engine))
    recall = _recalled(data, case, fits, cost) if case.remembered else None
    work = replace(_work(case, prompts, output, cost), recall=recall)
    search = Search(keep=case.keep) if not case.chunk else Search(chunks=(case.chunk,), keep=case.keep)
    return [_row(case, work, simulate(work, engine, policy, case.seed, search)) for policy in case.policies]


def _rows(data: Path, case: Case, cost: CostModel) -> list[mixes.Row]:
    if case.shape is None:
        return mixes.make(data, case.mix, case.scale, case.seed)
    dense, light = case.mix.split("+")
    rows = mixes.of_shape(data, dense, light, *case.shape, cost, round(40_000 * case.scale), case.seed)
    return [rows[place] for place in np.random.default_rng(case.seed).permutation(len(rows))]


def _recalled(data: Path, case: Case, rows: list[mixes.Row], cost: CostModel) -> Recall | None:
    """Return what a service that ran another draw of the mix remembers of these requests."""
    earlier = _rows(data, replace(case, seed=case.seed + EARLIER), cost)
    return recall(_keys(rows), learn(_keys(earlier), np.array([row.output_tokens for row in earlier]), MOST_PROFILES))


def _keys(rows: list[mixes.Row]) -> Keys:
    keys = np.empty((len(rows), 2), dtype=np.int64)
    keys[:, BEGINNING] = [zlib.crc32(repr(row.segments[0]).encode()) + 1 for row in rows]
    keys[:, KIND] = [(1 << 32) + sum(size for _, size in row.segments).bit_length() for row in rows]
    return keys


def _work(case: Case, prompts: Prompts, output: Column, cost: CostModel) -> Work:
    caps = np.full(len(output), LONGEST)
    if not case.length_error:
        return prepare(
            prompts, output, cost, caps, None, case.sample, case.seed, clock=time.perf_counter, foretold=case.foretold
        )
    work = prepare(prompts, output, cost, caps, sample=1.0, clock=time.perf_counter)
    factors = np.exp(np.random.default_rng(case.seed).normal(0.0, case.length_error, len(output)))
    said = np.maximum(1, output * factors)
    return replace(work, known=said.astype(np.int64), estimates=Estimates(said, said**2, said))


def _row(case: Case, work: Work, outcome: Outcome) -> dict[str, Any]:
    found = {**asdict(case), **asdict(outcome), "requests": len(work.output)}
    saved = work.best_saved_s
    found["density"] = (work.compute_s - saved) / work.memory_s
    found["sharing_possible"] = saved / work.compute_s
    found["series"] = _stretches(outcome.series).tolist() if case.series else None
    return found


def _stretches(series: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the seconds, compute and reads of equal stretches of steps; float64 [SERIES, 3]."""
    parts = np.array_split(series, SERIES)
    return np.array([part.sum(axis=0) for part in parts])


def _replicated(
    case: Case, prompts: Prompts, output: Column, cost: CostModel, engine: EngineModel
) -> Iterator[dict[str, Any]]:
    """Run each replica's partition of our plan, and yield a row per policy; the slowest replica counts."""
    work = _work(case, prompts, output, cost)
    outputs = Outputs(work.caps, work.known, sampled=work.sample, sampled_tokens=output[work.sample])
    plan = plan_window(prompts, outputs, cost, shape=Shape(replicas=case.replicas))
    parts = [np.sort(plan.order[first:last]) for first, last in itertools.pairwise(plan.partitions.tolist())]
    for policy in case.policies:
        outcomes: list[Outcome] = []
        for part in parts:
            own = _work(case, _subset(prompts, part), output[part], cost)
            outcomes.append(simulate(own, engine, policy, case.seed))
        slowest = max(outcomes, key=lambda outcome: outcome.seconds)
        tokens = int(work.lengths.sum() + output.sum())
        yield _row(case, work, replace(slowest, tokens_per_s=tokens / slowest.seconds))


def _windowed(
    case: Case, prompts: Prompts, output: Column, cost: CostModel, engine: EngineModel
) -> Iterator[dict[str, Any]]:
    """Run the requests in several windows, one after the other, and yield a row per policy; the sum counts."""
    whole = _work(case, prompts, output, cost)
    for policy in case.policies:
        outcomes = [
            simulate(_work(case, _subset(prompts, part), output[part], cost), engine, policy, case.seed)
            for part in np.array_split(np.arange(len(output)), case.windows)
        ]
        seconds = sum(outcome.seconds for outcome in outcomes)
        share = whole.practical_s(engine) / seconds
        yield _row(case, whole, replace(outcomes[0], seconds=seconds, share_of_practical=share))


def _subset(prompts: Prompts, chosen: Column) -> Prompts:
    assert prompts.sizes is not None
    spans = [slice(prompts.starts[i], prompts.starts[i + 1]) for i in chosen.tolist()]
    counts = prompts.starts[chosen + 1] - prompts.starts[chosen]
    return Prompts(
        np.concatenate([prompts.tokens[span] for span in spans]),
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([prompts.sizes[span] for span in spans]),
    )


def _grid(suite: str, dense: str) -> list[Case]:
    """Return 65 mixes: density 0.80 to 1.40, sharing 0.05 to 0.45."""
    return [
        Case(suite, f"{dense}+long", shape=(round(0.8 + 0.05 * d, 2), round(0.05 + 0.1 * s, 2)), scale=0.2)
        for d in range(13)
        for s in range(5)
    ]


def _machines() -> list[Case]:
    machines = [
        ("llama-3-8b", "a100-80gb", 1),
        ("llama-3-8b", "h100", 1),
        ("llama-3-8b", "h200", 1),
        ("llama-3-8b", "l40s", 1),
        ("llama-2-7b", "a100-80gb", 1),
        ("qwen-2.5-7b", "a100-80gb", 1),
        ("llama-3-70b", "a100-80gb", 8),
        ("llama-3-70b", "h200", 4),
        ("qwen-2.5-72b", "a100-80gb", 8),
        ("deepseek-67b", "a100-80gb", 8),
    ]
    return [
        Case("machines", "azure_code_2023+long", model=model, gpu=gpu, tp=tp, shape=shape)
        for model, gpu, tp in machines
        for shape in ((1.1, 0.35), (1.1, 0.05))
    ]


SUITES: dict[str, Callable[[], list[Case]]] = {
    "table2": lambda: [Case("table2", mix, ALL, LARGE, series=True) for mix in FOUR],
    "small": lambda: [Case("small", mix, MAIN, LARGE / 10, seed) for mix in FOUR for seed in range(6)],
    "known": lambda: [Case("known", mix, MAIN, scale, sample=1.0) for mix in FOUR for scale in (LARGE, LARGE / 10)],
    "learned": lambda: [
        *(Case("learned", mix, ("batchweave",), LARGE, foretold=False) for mix in FOUR),
        *(Case("learned", mix, ("batchweave",), LARGE / 10, seed, foretold=False) for mix in FOUR for seed in range(6)),
        *(Case("learned", mix, ("batchweave",), 1.0, seed, foretold=False) for mix in HARD for seed in range(2)),
    ],
    "remembered": lambda: [replace(case, suite="remembered", remembered=True) for case in SUITES["learned"]()],
    "hard": lambda: [
        *(Case("hard", mix, MAIN, 1.0, seed) for mix in HARD for seed in range(2)),
        *(Case("hard", mix, MAIN, 10.0) for mix in HARD),
    ],
    "prompts": lambda: [
        Case("prompts", f"prompts-{most}", MAIN, 1.0, clock=clock)
        for most in (800, 1800, 3000)
        for clock in ("overlapped", "mixed")
    ],
    "varied": lambda: [
        *(Case("varied", f"a100-r1-{number}", MAIN, 2.0, seed) for number in range(1, 5) for seed in range(2)),
        *(
            Case("varied", mix, MAIN, 2.0, seed)
            for mix in ("sharegpt", "lmsys_chat", "servegen_deepseek_r1")
            for seed in range(3)
        ),
    ],
    "h200": lambda: [Case("h200", f"h200-{number}", MAIN, 2.0, gpu="h200") for number in range(1, 5)],
    "twentieth": lambda: [
        Case(
            "twentieth",
            f"h200-{number}",
            ("fcfs", "dfs", "random", "batchweave"),
            0.05,
            seed,
            gpu="h200",
            foretold=False,
        )
        for number in range(1, 5)
        for seed in range(8)
    ],
    "others": lambda: [
        *(Case("others", mix, MAIN, 2.0) for mix in mixes.OTHERS),
        *(Case("others", mix, MAIN, LARGE, 11) for mix in FOUR),
    ],
    "grid": lambda: _grid("grid", "azure_code_2023"),
    "grid-sharegpt": lambda: _grid("grid-sharegpt", "sharegpt"),
    "grid-conv": lambda: _grid("grid-conv", "azure_conv_2023"),
    "grid-m-mid": lambda: _grid("grid-m-mid", "servegen_m_mid"),
    "machines": _machines,
    "replicas": lambda: [
        Case("replicas", mix, ("batchweave",), LARGE, replicas=count) for mix in FOUR for count in (1, 2, 4, 8)
    ],
    "clocks": lambda: [Case("clocks", mix, MAIN, clock=clock) for mix in FOUR for clock in ("mixed", "sequential")],
    "sensitivity": lambda: [
        *(
            Case("sensitivity", mix, ("batchweave",), 1.0, seed, sample=share)
            for mix in ("a100-1", "a100-4")
            for share in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
            for seed in range(3)
        ),
        *(
            Case("sensitivity", mix, MAIN, interference=interference)
            for mix in ("a100-1", "a100-4")
            for interference in (0.0, 0.3)
        ),
        *(
            Case("sensitivity", mix, MAIN, length_error=error)
            for mix in ("a100-1", "a100-4")
            for error in (0.1, 0.25, 0.5, 1.0)
        ),
        *(
            Case("sensitivity", mix, ("dfs", "random"), chunk=chunk)
            for mix in ("a100-1", "a100-4")
            for chunk in (128, 256, 512, 1024, 2048, 4096)
        ),
        *(
            Case("sensitivity", mix, ("blendserve", "batchweave"), keep=keep)
            for mix in ("a100-1", "documents")
            for keep in (0.5, 0.9, 0.95, 1.0)
        ),
        *(
            Case("sensitivity", mix, ("batchweave",), LARGE, windows=windows)
            for mix in ("a100-1", "a100-4")
            for windows in (1, 2, 4, 10, 30)
        ),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--output", type=Path, default=Path("docs/evaluation"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--policies", help="run only these, as a,b; keep an earlier run's rows of other policies")
    given = parser.parse_args()
    chosen = set(given.policies.split(",") if given.policies else ALL)
    given.output.mkdir(parents=True, exist_ok=True)
    for suite in given.suites:
        cases = [replace(case, policies=tuple(p for p in case.policies if p in chosen)) for case in SUITES[suite]()]
        started, wanted = time.perf_counter(), [case for case in cases if case.policies]
        path = given.output / f"{suite}.jsonl"
        earlier = path.read_text().splitlines() if given.policies and path.exists() else []
        kept = [line for line in earlier if json.loads(line)["policy"] not in chosen]
        # Seconds include planning, and the first plan of a process would include compiling.
        with ProcessPoolExecutor(given.processes, initializer=_compile) as pool, path.open("w") as file:
            file.writelines(line + "\n" for line in kept)
            waiting = {pool.submit(run, given.data, case): case for case in wanted}
            for done, future in enumerate(as_completed(waiting), start=1):
                case = waiting[future]
                try:
                    rows = future.result()
                except mixes.NoSuchMix as error:
                    print(f"{suite} {done}/{len(wanted)} {case.mix} {case.shape}: {error}")
                    continue
                for row in rows:
                    file.write(json.dumps(_rounded(row)) + "\n")
                file.flush()
                best = ", ".join(f"{row['policy']} {row['share_of_practical']:.3f}" for row in rows)
                minutes = (time.perf_counter() - started) / 60
                print(
                    f"{suite} {done}/{len(wanted)} ({minutes:.1f} min) {case.mix} seed {case.seed}: {best}", flush=True
                )


def _compile() -> None:
    warm_up.compile_planner()
    compile_simulator.main()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    main()
