"""python -m benchmarks.simulate: compares ours with what papers describe and engines do, on the simulated engine."""

from pathlib import Path
from typing import Annotated

import typer

from batchweave.terminal import fail
from benchmarks.simulate import colocation
from benchmarks.simulate.batches import POLICIES
from benchmarks.simulate.colocation import POOLS, parse_pools, policies_of
from benchmarks.simulate.race import draw_race
from engine_ext.errors import BatchweaveError
from service.cli.profile_slo import LoadOption, RelativeOption, SloOption, read_files
from service.cli.simulate import (
    ClockOption,
    Engine,
    InterferenceOption,
    JsonOption,
    PoliciesOption,
    ProfileClockOption,
    ProfileOption,
    SampleOption,
    SeedOption,
    compare,
)
from service.cli.workload_files import (
    DtypeOption,
    GpuOption,
    LengthsOption,
    ModelOption,
    SharedCacheOption,
    TpOption,
    check_paths,
)
from service.workloads.colocation import parse_wanted
from service.workloads.fitting import ASSUMED_INTERFERENCE

PoolsOption = Annotated[
    str | None,
    typer.Option(
        "--pools",
        help=f"Two engines: {POOLS}. base-pd, online-priority and ooco divide the work between them; the others run "
        "side by side on both, with half of the requests each.",
    ),
]


def simulate(
    workload: Annotated[
        Path | None, typer.Option("--workload", help="A workload file, or a batch file with --lengths.")
    ] = None,
    model: ModelOption = "llama-3-8b",
    gpu: GpuOption = "h200",
    tp: TpOption = 1,
    policies: PoliciesOption = None,
    online: Annotated[
        Path | None, typer.Option("--online", help="A workload file of online requests; each line has arrival_s.")
    ] = None,
    offline: Annotated[
        Path | None,
        typer.Option("--offline", help="The batch beside them: a workload file, or a batch file with --lengths."),
    ] = None,
    slo: SloOption = None,
    relative: RelativeOption = None,
    load: LoadOption = None,
    pools: PoolsOption = None,
    clock: ClockOption = "overlapped",
    interference: InterferenceOption = ASSUMED_INTERFERENCE,
    sample: SampleOption = 0.01,
    seed: SeedOption = 0,
    lengths: LengthsOption = None,
    shared_cache: SharedCacheOption = False,
    dtype: DtypeOption = "bf16",
    profile: ProfileOption = None,
    profile_clock: ProfileClockOption = "mixed",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw each policy's use of time to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a workload through a simulated engine, one policy after another, each at its best settings.

    Step times are predictions from datasheets. Every policy knows the output lengths of the same sample. The fixed
    orders run that sample first, with the best of several chunk sizes and admission reserves. Examples:

    - `python -m benchmarks.simulate --workload trace.jsonl --gpu a100-80gb --plot policies.png`
    - `python -m benchmarks.simulate --workload trace.jsonl --policies dfs,blendserve,batchweave --json`

    With `--online` and `--offline` in place of `--workload`, it compares schedulers for online requests beside a batch.
    Each line of the online file then has `arrival_s`, its seconds from the first; where a file has requests of both
    kinds, `class` says "online" or "batch". Each scheduler gets the settings with which it does most for the
    batch while the bounds are kept; SGLang's clock with mixed chunks is assumed. Examples:

    - `python -m benchmarks.simulate --online chat.jsonl --offline trace.jsonl --slo ttft=1,tpot=0.05,percentile=0.99`
    - `python -m benchmarks.simulate --online chat.jsonl --offline trace.jsonl --load 0.3 --relative mean_tbt=0.05`
    - `python -m benchmarks.simulate --online chat.jsonl --offline trace.jsonl --pools strict:1,relaxed:1 --json`
    """
    engine = Engine(model, gpu, tp, dtype, clock, interference, profile, profile_clock)
    try:
        if workload is None:
            if online is None or offline is None:
                fail("give --workload FILE, or --online FILE and --offline FILE")
            if plot is not None or profile is not None:
                fail("--plot and --profile are for --workload only")
            has_pools = parse_pools(pools)
            names, wanted = policies_of(policies, has_pools), parse_wanted(slo, relative)
            check_paths((online, offline, lengths), (), None)
            cost, files = engine.cost, read_files(online, offline, model, lengths, shared_cache)
            colocation.compare(files, cost, wanted, load, seed, names, has_pools, as_json)
            return
        if any(each is not None for each in (online, offline, slo, relative, load, pools)):
            fail(
                "--workload is for a batch alone; --slo, --relative, --load and --pools go with --online and --offline"
            )
        check_paths((workload, lengths, profile), (), plot)
        outcomes = compare(workload, engine, policies, POLICIES, sample, seed, lengths, shared_cache, as_json)
        if plot is not None:
            draw_race(outcomes, plot, f"{workload.name}: {model} on {gpu}, {clock}")
    except (BatchweaveError, OSError) as error:
        fail(str(error))


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command()(simulate)

if __name__ == "__main__":
    app()
