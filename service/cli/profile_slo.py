"""`batchweave profile-slo`: how long a step may be with a batch in it, found on a simulated engine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from batchweave.terminal import fail
from engine_ext.errors import BatchweaveError
from service.cli.workload_files import (
    DtypeOption,
    GpuOption,
    LengthsOption,
    ModelOption,
    TpOption,
    check_paths,
    console,
    cost_model,
    read_file,
)
from service.workloads.colocation import METRICS, Given, alone_line, parse_wanted, profile, put_beside

COMPILES = "simulates; the first time it compiles, which takes one to two minutes"

SloOption = Annotated[
    str | None,
    typer.Option(
        "--slo",
        help="Bounds in seconds that this share of the online requests keeps: ttft=1,tpot=0.05,percentile=0.99. "
        "These are the default where --relative is not given either.",
    ),
]
RelativeOption = Annotated[
    str | None,
    typer.Option(
        "--relative", help=f"How much longer than online alone: mean_tbt=0.05 for 5%. Metrics: {', '.join(METRICS)}."
    ),
]
LoadOption = Annotated[
    float | None,
    typer.Option(
        "--load", help="Thin or repeat the arrivals until they are this share of what the engine can do of them alone."
    ),
]


def profile_slo(
    online: Annotated[Path, typer.Option("--online", help="A workload file of recorded online requests.")],
    offline: Annotated[Path, typer.Option("--offline", help="A batch as it usually runs beside them.")],
    output: Annotated[Path | None, typer.Option("--output", help="Write the limits to this file for workers.")] = None,
    model: ModelOption = "llama-3-8b",
    gpu: GpuOption = "h200",
    tp: TpOption = 1,
    lengths: LengthsOption = None,
    dtype: DtypeOption = "bf16",
    slo: SloOption = None,
    relative: RelativeOption = None,
    load: LoadOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the arrivals that --load leaves.")] = 0,
) -> None:
    """Find how long a step may be with a batch in it, so that online requests keep their bounds.

    Tries limits of a step on the simulated engine, with the arrivals of a file, and prints the ones with which the
    batch gets most. A worker keeps them if BATCHWEAVE_SLO_FILE names the output. Examples:

    - `batchweave profile-slo --online chat.jsonl --offline trace.jsonl --relative mean_tbt=0.05 --output slo.json`
    - `batchweave profile-slo --online chat.jsonl --offline trace.jsonl --slo ttft=1,tpot=0.05,percentile=0.99`
    """
    try:
        wanted = parse_wanted(slo, relative)
        check_paths((online, offline, lengths), (output,), None)
        cost = cost_model(model, gpu, tp, dtype, dtype if dtype == "fp8" else "bf16")
        files = read_files(online, offline, model, lengths)
        console.print(COMPILES, style="dim")
        beside = put_beside(files, cost, load, seed)
        contest = beside.contest(cost, wanted.slo)
        say_load(alone_line(contest, beside.load), beside.load)
        found = json.dumps(profile(contest, wanted), indent=2, allow_nan=False)
        if output is not None:
            output.write_text(found + "\n")
            console.print(f"wrote {output}; start workers with BATCHWEAVE_SLO_FILE={output}", style="dim")
    except (BatchweaveError, OSError) as error:
        fail(str(error))
    print(found)


def read_files(
    online: Path, offline: Path, model: str, lengths: Path | None, shared_cache: bool = False
) -> tuple[Given, Given]:
    """Read the online requests and the batch. Raises WorkloadError, OSError."""
    theirs = read_file(online, model, None, shared_cache)
    return Given(online, theirs), Given(offline, read_file(offline, model, lengths, shared_cache))


def say_load(line: str, load: float) -> None:
    """Print what online requests get alone. `load`: the share of what the engine can do of them."""
    console.print(line, style="dim")
    if load > 1:
        console.print("more online requests come than can be done; there is nothing to spare", style="yellow")
