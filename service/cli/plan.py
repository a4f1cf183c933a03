"""`batchweave plan`: estimates what a file costs, before any GPU is rented."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from batchweave.terminal import fail
from engine_ext.costs.cost import CostModel
from engine_ext.errors import BatchweaveError
from engine_ext.plan.window import Shape
from service.cli.workload_files import (
    DtypeOption,
    GpuOption,
    LengthsOption,
    ModelOption,
    SharedCacheOption,
    TpOption,
    as_time,
    check_paths,
    cost_model,
    not_full,
    out,
    read_file,
    small_by,
)
from service.workloads.report import facts, plan_workload, with_sample, write_order

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
    tp: TpOption = 1,
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
        out().print(_table(found, cost))


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
            f"{as_time(ideal)} if compute and KV reads overlap wholly, {as_time(sequential)} if not at all",
        ),
        ("GPU time", f"{as_time(ideal * gpus)} to {as_time(sequential * gpus)}"),
    ]
    if "price_ideal" in found:
        rows.append(("price", f"{found['price_ideal']:,.2f} to {found['price_sequential']:,.2f}"))
    if (more := small_by(found["longest_answer_s"], found["hours_ideal"] * 3600)) is not None:
        enough = f"{found['requests'] * more:,.0f} such requests"
        low = f"these figures are too low. They can be trusted from about {enough} on"
        rows.append(("too small", f"{not_full(found['longest_answer_s'])}, and {low}"))
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
            f"{as_time(computed_s / 3600)} of compute (T_comp), {as_time(found['t_mem_s'] / 3600)} of reading the KV "
            "cache (T_mem)",
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


def _hours(found: dict[str, Any]) -> tuple[float, float]:
    return found["hours_ideal"], found["hours_sequential"]
