"""`batchweave plan` and `simulate`: estimate what a file costs and how it would run, before any GPU is rented."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine_ext.costs.calibrate import Calibration
from engine_ext.costs.cost import CostModel
from engine_ext.errors import BatchweaveError
from engine_ext.plan.window import Shape
from service.cli.colocation import (
    Asked,
    LoadOption,
    OfflineOption,
    OnlineOption,
    PoolsOption,
    RelativeOption,
    SloOption,
    compare,
)
from service.cli.workload_files import (
    DtypeOption,
    GpuOption,
    LengthsOption,
    ModelOption,
    SharedCacheOption,
    check_paths,
    console,
    cost_model,
    read_file,
)
from service.terminal import fail
from service.workloads.fitting import ASSUMED_INTERFERENCE, fit
from service.workloads.forecast import ALL_POLICIES, Outcome, check_options, forecast, row_of
from service.workloads.race import draw_race
from service.workloads.report import facts, longest_answer_s, plan_workload, with_sample, write_order

SMALL = 0.1  # of the whole time; with a longer longest answer, a file is too small to tell anything
LEGEND = """ideal      the least time, if each shared prefix were computed once and all else overlapped, as a share
bound      the same for steps that are mixed as this engine's clock allows: what a policy can reach
sharing    of the prefix sharing that is possible, the part that this order kept
retracted  requests that were taken off the engine for lack of KV cache, and went on later
best at    the settings at which the policy was fastest, of those that were tried"""

FileArgument = Annotated[Path, typer.Argument(help="A batch file (JSONL of requests) or a workload file.")]

SampleOption = Annotated[
    float | None,
    typer.Option(
        "--sample", help="Assume that only this share of output lengths is known, sampled as the planner would."
    ),
]


def plan(
    file: FileArgument,
    model: ModelOption = "llama-3-8b",
    gpu: GpuOption = "h200",
    tp: Annotated[int, typer.Option("--tp", min=1, max=1024, help="GPUs that share one copy of the model.")] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, max=4096, help="Copies of the model, one partition each.")] = 1,
    lengths: LengthsOption = None,
    sample: SampleOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the sample.")] = 0,
    shared_cache: SharedCacheOption = False,
    dtype: DtypeOption = "bf16",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Type of the KV cache: fp32, fp16, bf16, fp8.")] = "bf16",
    keep: Annotated[
        float, typer.Option("--keep", help="Share of the possible prefix sharing that splits must keep.")
    ] = 0.99,
    price: Annotated[float | None, typer.Option("--price", min=0, max=1e6, help="Price of one GPU per hour.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the order of requests to this file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the prefix tree and the scan to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Plan a file without running it: show what its prompts share, their compute density, and how long it would take.

    A workload file has one request per line: `{"segments": [[id, length], …], "output_tokens": d}`. Equal ids at equal
    depth mean equal content; of several tenants each has its own, unless the cache is shared. `id`, `tenant`,
    `deadline_s` and `max_tokens` are optional. Examples:

    - `batchweave plan requests.jsonl --model Qwen/Qwen2.5-7B-Instruct --gpu h100`
    - `batchweave plan requests.jsonl --lengths yesterday_output.jsonl --dp 4 --price 2.5`
    - `batchweave plan trace.jsonl --gpu a100-80gb --sample 0.01 --plot plan.png --output order.jsonl`
    """
    try:
        check_paths((file, lengths), (output,), plot)
        cost = cost_model(model, gpu, tp, dtype, kv_dtype)
        workload = read_file(file, model, lengths, shared_cache)
        if sample is not None:
            workload = with_sample(workload, sample, seed)
        planned = plan_workload(workload, cost, Shape(replicas=dp, keep_sharing=keep))
        found = facts(planned, cost, dp, workload.wishes.deadline_s)
        if price is not None:
            found["price_ideal"], found["price_sequential"] = (
                each * price * found["accelerators"] for each in _hours(found)
            )
        if output is not None:
            write_order(output, workload, planned.plan)
        if plot is not None:
            from service.workloads.picture import draw_plan

            draw_plan(planned.plan, plot, f"{file.name}: {cost.shape.name} on {cost.machine.hardware.name}")
    except (BatchweaveError, OSError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        _out().print(_table(found, cost))


def simulate(
    workload: Annotated[
        Path | None, typer.Option("--workload", help="A workload file, or a batch file with --lengths.")
    ] = None,
    model: ModelOption = "llama-3-8b",
    gpu: GpuOption = "h200",
    tp: Annotated[int, typer.Option("--tp", min=1, max=1024, help="GPUs that share one copy of the model.")] = 1,
    policies: Annotated[
        str | None, typer.Option("--policies", help=f"Policies to run, separated by commas. Default: {ALL_POLICIES}.")
    ] = None,
    online: OnlineOption = None,
    offline: OfflineOption = None,
    slo: SloOption = None,
    relative: RelativeOption = None,
    load: LoadOption = None,
    pools: PoolsOption = None,
    clock: Annotated[
        str, typer.Option("--clock", help="How GEMM and attention run: overlapped, mixed or sequential.")
    ] = "overlapped",
    interference: Annotated[
        float, typer.Option("--interference", min=0, max=1, help="Share of the hidden time that overlapping costs.")
    ] = ASSUMED_INTERFERENCE,
    sample: Annotated[float, typer.Option("--sample", help="Share of requests with known lengths; 1 for all.")] = 0.01,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the sample and of random orders.")] = 0,
    lengths: LengthsOption = None,
    shared_cache: SharedCacheOption = False,
    dtype: DtypeOption = "bf16",
    profile: Annotated[
        Path | None, typer.Option("--profile", help="File of steps measured on an engine; replaces the datasheet.")
    ] = None,
    profile_clock: Annotated[
        str, typer.Option("--profile-clock", help="Clock of the measured engine; SGLang's is mixed.")
    ] = "mixed",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw each policy's use of time to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
) -> None:
    """Run a workload through a simulated engine, one policy after another, each at its best settings.

    Step times are predictions from datasheets. Every policy knows the output lengths of the same sample. The fixed
    orders run that sample first, with the best of several chunk sizes and admission reserves. Examples:

    - `batchweave simulate --workload trace.jsonl --gpu a100-80gb`
    - `batchweave simulate --workload trace.jsonl --policies dfs,random,batchweave --clock sequential --json`
    - `batchweave simulate --workload trace.jsonl --profile steps.jsonl --plot policies.png`

    With `--online` and `--offline` in place of `--workload`, it compares schedulers for online requests beside a batch.
    Each line of the online file then has `arrival_s`, its seconds from the first; where a file has requests of both
    kinds, `class` says "online" or "batch". Each scheduler gets the settings with which it does most for the
    batch while the bounds are kept; SGLang's clock with mixed chunks is assumed. Examples:

    - `batchweave simulate --online chat.jsonl --offline trace.jsonl --slo ttft=1,tpot=0.05,percentile=0.99`
    - `batchweave simulate --online chat.jsonl --offline trace.jsonl --load 0.3 --relative mean_tbt=0.05 --json`
    - `batchweave simulate --online chat.jsonl --offline trace.jsonl --pools strict:1,relaxed:1 --slo ttft=2,tpot=0.05`
    """
    if workload is None:
        if online is None or offline is None:
            fail("give --workload FILE, or --online FILE and --offline FILE")
        if plot is not None or profile is not None:
            fail("--plot and --profile are for --workload only")
        asked = Asked(online, offline, model, gpu, tp, lengths, dtype, slo, relative, load, seed, pools, shared_cache)
        compare(asked, policies, as_json)
        return
    if any(each is not None for each in (online, offline, slo, relative, load, pools)):
        fail("--workload is for a batch alone; --slo, --relative, --load and --pools go with --online and --offline")
    names = [name.strip() for name in (policies or ALL_POLICIES).split(",") if name.strip()]
    try:
        check_options(names, clock, profile_clock)
        check_paths((workload, lengths, profile), (), plot)
        cost = cost_model(model, gpu, tp, dtype, dtype if dtype == "fp8" else "bf16")
        given = read_file(workload, model, lengths, shared_cache)
        calibration = fit(profile, profile_clock, interference) if profile is not None else None
        running = forecast(given, cost, names, clock, interference, sample, seed, calibration)
        longest = float(given.outputs.known.max(initial=0))
        outcomes = _race(running, calibration, as_json, longest, cost)
        if plot is not None:
            draw_race(outcomes, plot, f"{workload.name}: {model} on {gpu}, {clock}")
    except (BatchweaveError, OSError) as error:
        fail(str(error))


def _race(
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
        _out().print(_comparison(rows))
        _out().print(LEGEND, style="dim")
        longest_s = longest_answer_s(tokens, cost)
        if (more := _small_by(longest_s, min(outcome.seconds for outcome in outcomes))) is not None:
            _out().print(f"Too small: {_not_full(longest_s)}. Take {more:,.0f} times as many requests.")
    return outcomes


def _out() -> Console:
    """Return a console on standard output, wide enough for a table when it is not a terminal."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 120)


def _comparison(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for name in ("policy", "tokens/s", "time", "ideal", "bound", "sharing", "retracted", "planner", "best at"):
        table.add_column(name, justify="left" if name in ("policy", "best at") else "right", no_wrap=True)
    for row in sorted(rows, key=lambda each: each["seconds"]):
        table.add_row(
            row["policy"],
            f"{row['tokens_per_s']:,.0f}",
            _time(row["seconds"] / 3600),
            f"{row['share_of_ideal']:.1%}",
            f"{row['share_of_practical']:.1%}",
            f"{row['sharing_kept']:.1%}",
            f"{row['retractions']:,}",
            f"{row['planner_s']:.2f} s",
            row["setting"],
        )
    return table


def _table(found: dict[str, Any], cost: CostModel) -> Table:
    table = Table(show_header=False, box=None)
    ideal, sequential = _hours(found)
    gpus = found["accelerators"]
    computed_s = (1 - found["sharing"]) * found["t_comp_s"]
    rows = [
        ("requests", f"{found['requests']:,}"),
        ("tokens", f"{found['prompt_tokens']:,} of prompts, {found['output_tokens']:,} of answers, as expected"),
        (
            f"on {gpus} x {cost.machine.hardware.name}",
            f"{_time(ideal)} if compute and KV reads overlap wholly, {_time(sequential)} if not at all",
        ),
        ("GPU time", f"{_time(ideal * gpus)} to {_time(sequential * gpus)}"),
    ]
    if "price_ideal" in found:
        rows.append(("price", f"{found['price_ideal']:,.2f} to {found['price_sequential']:,.2f}"))
    if (more := _small_by(found["longest_answer_s"], found["hours_ideal"] * 3600)) is not None:
        enough = f"{found['requests'] * more:,.0f} such requests"
        low = f"these figures are too low. They can be trusted from about {enough} on"
        rows.append(("too small", f"{_not_full(found['longest_answer_s'])}, and {low}"))
    if found["late_requests"]:
        rows.append(("late", f"{found['late_requests']:,} requests miss their deadline even if everything overlaps"))
    if found["too_long_requests"]:
        rows.append(("too long", f"{found['too_long_requests']:,} requests do not fit into the KV cache, even alone"))
    rows += [
        (
            "shared prefixes",
            f"{found['prompt_sharing']:.1%} of the prompt tokens need not be computed again, which saves "
            f"{found['sharing']:.1%} of all compute; this order keeps {found['sharing_kept']:.2%} of that",
        ),
        (
            "work",
            f"{_time(computed_s / 3600)} of compute (T_comp), {_time(found['t_mem_s'] / 3600)} of reading the KV cache "
            "(T_mem)",
        ),
        ("density", _densities(found)),
    ]
    rows.append(("planning", f"{found['planning_s']:.2f} s, {found['peak_rss_bytes'] / 1e6:,.0f} MB of memory at most"))
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _densities(found: dict[str, Any]) -> str:
    """Return what is said of compute per second of KV reads, over all requests and at the ends of the scan."""
    if found["density"] is None:
        return "no KV reads"
    ends = [f"{found[key]:.3g}" if found[key] is not None else "no reads" for key in ("density_left", "density_right")]
    whole = f"{found['density']:.3g} s of compute for each second of KV reads"
    return f"{whole}; {ends[0]} at the end of the order that is heavy on compute, {ends[1]} at the other"


def _small_by(longest_s: float, whole_s: float) -> float | None:
    """Return how many times as many requests a file needs for its figures to be trusted; None if it has enough."""
    return None if longest_s < SMALL * whole_s else longest_s / max(whole_s, 1e-9) / SMALL


def _not_full(longest_s: float) -> str:
    alone = f"the longest answer takes {_time(longest_s / 3600)} alone, over a tenth of the whole time"
    return f"{alone}, so the engine is not full for much of it"


def _hours(found: dict[str, Any]) -> tuple[float, float]:
    return found["hours_ideal"], found["hours_sequential"]


def _time(hours: float) -> str:
    """Format a time in the unit that people read, down to milliseconds."""
    if hours >= 1:
        return f"{hours:,.2f} h"
    if hours >= 1 / 60:
        return f"{hours * 60:.1f} min"
    return f"{hours * 3600:.2f} s" if hours >= 1 / 3600 else f"{hours * 3.6e6:.3g} ms"
