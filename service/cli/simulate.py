"""`batchweave simulate`: how a file would run with ours and with SGLang's own policies, before any GPU is rented."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from batchweave.terminal import fail
from engine_ext.costs.calibrate import Calibration
from engine_ext.costs.cost import CostModel
from engine_ext.errors import BatchweaveError
from service.cli.workload_files import (
    DtypeOption,
    GpuOption,
    LengthsOption,
    ModelOption,
    SharedCacheOption,
    TpOption,
    as_time,
    check_paths,
    console,
    cost_model,
    not_full,
    out,
    read_file,
    small_by,
)
from service.workloads.fitting import ASSUMED_INTERFERENCE, fit
from service.workloads.forecast import OWN, Outcome, Policy, check_options, forecast, row_of
from service.workloads.report import longest_answer_s

LEGEND = """ideal      the least time, if each shared prefix were computed once and all else overlapped, as a share
bound      the same for steps that are mixed as this engine's clock allows: what a policy can reach
sharing    of the prefix sharing that is possible, the part that this order kept
retracted  requests that were taken off the engine for lack of KV cache, and went on later
best at    the settings at which the policy was fastest, of those that were tried; SGLang's own for a default"""

PoliciesOption = Annotated[
    str | None, typer.Option("--policies", help="Policies to run, separated by commas. Default: all.")
]
ClockOption = Annotated[
    str, typer.Option("--clock", help="How GEMM and attention run: overlapped, mixed or sequential.")
]
InterferenceOption = Annotated[
    float, typer.Option("--interference", min=0, max=1, help="Share of the hidden time that overlapping costs.")
]
SampleOption = Annotated[float, typer.Option("--sample", help="Share of requests with known lengths; 1 for all.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Random seed of the sample and of random orders.")]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="File of steps measured on an engine; replaces the datasheet.")
]
ProfileClockOption = Annotated[
    str, typer.Option("--profile-clock", help="Clock of the measured engine; SGLang's is mixed.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print rows as JSON.")]


def simulate(
    workload: Annotated[Path, typer.Option("--workload", help="A workload file, or a batch file with --lengths.")],
    model: ModelOption = "llama-3-8b",
    gpu: GpuOption = "h200",
    tp: TpOption = 1,
    policies: PoliciesOption = None,
    clock: ClockOption = "overlapped",
    interference: InterferenceOption = ASSUMED_INTERFERENCE,
    sample: SampleOption = 0.01,
    seed: SeedOption = 0,
    lengths: LengthsOption = None,
    shared_cache: SharedCacheOption = False,
    dtype: DtypeOption = "bf16",
    profile: ProfileOption = None,
    profile_clock: ProfileClockOption = "mixed",
    as_json: JsonOption = False,
) -> None:
    """Run a workload through a simulated engine: by batchweave, and by SGLang's own policies.

    Each of SGLang's runs with its default settings (`fcfs-default`, ...) and with the best of several chunk sizes and
    admission reserves (`fcfs`, ...). Step times are predictions from datasheets. Every policy knows the output lengths
    of the same sample. `--clock sequential` is SGLang as it comes, `mixed` SGLang with mixed chunks. Examples:

    - `batchweave simulate --workload trace.jsonl --gpu a100-80gb`
    - `batchweave simulate --workload trace.jsonl --policies fcfs-default,lpm,batchweave --clock sequential --json`
    - `batchweave simulate --workload trace.jsonl --profile steps.jsonl`
    """
    engine = Engine(model, gpu, tp, dtype, clock, interference, profile, profile_clock)
    try:
        check_paths((workload, lengths, profile), (), None)
        compare(workload, engine, policies, OWN, sample, seed, lengths, shared_cache, as_json)
    except (BatchweaveError, OSError) as error:
        fail(str(error))


@dataclass(frozen=True, slots=True)
class Engine:
    """Describes the engine to simulate, by the options of these names."""

    model: str
    gpu: str
    tp: int
    dtype: str
    clock: str
    interference: float
    profile: Path | None
    profile_clock: str

    @property
    def cost(self) -> CostModel:
        return cost_model(self.model, self.gpu, self.tp, self.dtype, self.dtype if self.dtype == "fp8" else "bf16")


def compare(
    workload: Path,
    engine: Engine,
    policies: str | None,
    known: Mapping[str, Policy],
    sample: float,
    seed: int,
    lengths: Path | None,
    shared_cache: bool,
    as_json: bool,
) -> list[Outcome]:
    """Run a workload with the named ones of the `known` policies, or with all; print and return what each took.

    Raises BatchweaveError, OSError.
    """
    names = list(known) if policies is None else [name.strip() for name in policies.split(",") if name.strip()]
    check_options(names, known, engine.clock, engine.profile_clock)
    cost, interference = engine.cost, engine.interference
    given = read_file(workload, engine.model, lengths, shared_cache)
    calibration = fit(engine.profile, engine.profile_clock, interference) if engine.profile is not None else None
    running = forecast(given, cost, names, known, engine.clock, interference, sample, seed, calibration)
    return _show(running, calibration, as_json, float(given.outputs.known.max(initial=0)), cost)


def _show(
    running: Iterator[Outcome], calibration: Calibration | None, as_json: bool, tokens: float, cost: CostModel
) -> list[Outcome]:
    """Run the policies one after another, and print their rows. `tokens`: of the longest answer."""
    for name, misfit in calibration.errors.items() if calibration is not None else ():
        console.print(f"fit of {name}: off by {misfit.mean:.1%}, at most {misfit.largest:.0%}", style="dim")
    outcomes: list[Outcome] = []
    for outcome in running:
        outcomes.append(outcome)
        if not as_json:
            console.print(f"{outcome.policy}: {outcome.seconds / 3600:.3f} h", style="dim")
    rows = [row_of(outcome) for outcome in outcomes]
    if as_json:
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        out().print(_comparison(rows))
        out().print(LEGEND, style="dim")
        longest_s = longest_answer_s(tokens, cost)
        if (more := small_by(longest_s, min(outcome.seconds for outcome in outcomes))) is not None:
            out().print(f"Too small: {not_full(longest_s)}. Take {more:,.0f} times as many requests.")
    return outcomes


def _comparison(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for name in ("policy", "tokens/s", "time", "ideal", "bound", "sharing", "retracted", "planner", "best at"):
        table.add_column(name, justify="left" if name in ("policy", "best at") else "right", no_wrap=True)
    for row in sorted(rows, key=lambda each: each["seconds"]):
        table.add_row(
            row["policy"],
            f"{row['tokens_per_s']:,.0f}",
            as_time(row["seconds"] / 3600),
            f"{row['share_of_ideal']:.1%}",
            f"{row['share_of_practical']:.1%}",
            f"{row['sharing_kept']:.1%}",
            f"{row['retractions']:,}",
            f"{row['planner_s']:.2f} s",
            row["setting"],
        )
    return table
