"""`batchweave simulate --online` and `profile-slo`: online requests beside a batch on a simulated engine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_ext.errors import BatchweaveError
from service.cli.workload_files import (
    DtypeOption,
    GpuOption,
    LengthsOption,
    ModelOption,
    check_paths,
    console,
    cost_model,
    read_file,
)
from service.terminal import fail, print_table
from service.workloads.colocation import (
    METRICS,
    POOLS,
    Competition,
    compete,
    parse_pools,
    parse_wanted,
    policies_of,
    profile,
)

OnlineOption = Annotated[
    Path | None, typer.Option("--online", help="A workload file of online requests; each line has arrival_s.")
]
OfflineOption = Annotated[
    Path | None,
    typer.Option("--offline", help="The batch beside them: a workload file, or a batch file with --lengths."),
]
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
PoolsOption = Annotated[
    str | None,
    typer.Option(
        "--pools",
        help=f"Two engines: {POOLS}. base-pd, online-priority and ooco divide the work between them; the others run "
        "side by side on both, with half of the requests each.",
    ),
]
TpOption = Annotated[int, typer.Option("--tp", min=1, max=1024, help="GPUs that share one copy of the model.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds what both commands are told: the files, the engine, the bounds, and the online load."""

    online: Path
    offline: Path
    model: str
    gpu: str
    tp: int
    lengths: Path | None
    dtype: str
    slo: str | None
    relative: str | None
    load: float | None
    seed: int
    pools: str | None = None
    shared_cache: bool = False

    def competition(self, output: Path | None = None) -> Competition:
        """Read the files, and say what online requests get alone. Raises BatchweaveError, OSError."""
        wanted = parse_wanted(self.slo, self.relative)
        check_paths((self.online, self.offline, self.lengths), (output,), None)
        cost = cost_model(self.model, self.gpu, self.tp, self.dtype, self.dtype if self.dtype == "fp8" else "bf16")
        theirs = read_file(self.online, self.model, None, self.shared_cache)
        ours = read_file(self.offline, self.model, self.lengths, self.shared_cache)
        console.print("simulates; the first time it compiles, which takes one to two minutes", style="dim")
        pools = parse_pools(self.pools)
        held = compete(theirs, self.online, ours, self.offline, cost, wanted, self.load, self.seed, pools)
        _say_load(held)
        return held


def compare(asked: Asked, policies: str | None, as_json: bool) -> None:
    """Run the schedulers one after another, and print a row for each."""
    rows: list[dict[str, Any]] = []
    try:
        names = policies_of(policies, parse_pools(asked.pools))
        held = asked.competition()
        for name in names:
            best = held.best(name)
            rows.append(held.row(name, best))
            console.print(f"{name}: {_outcome(rows[-1], best is None)}", style="dim")
            if held.has_used_up(best):
                console.print(
                    f"{name} ended the whole batch before the last arrival, so its figure says little; "
                    "give a longer batch",
                    style="yellow",
                )
    except (BatchweaveError, OSError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        print_table(*_table(rows))


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
        asked = Asked(online, offline, model, gpu, tp, lengths, dtype, slo, relative, load, seed)
        held = asked.competition(output)
        found = json.dumps(profile(held), indent=2, allow_nan=False)
        if output is not None:
            output.write_text(found + "\n")
            console.print(f"wrote {output}; start workers with BATCHWEAVE_SLO_FILE={output}", style="dim")
    except (BatchweaveError, OSError) as error:
        fail(str(error))
    print(found)


def _say_load(held: Competition) -> None:
    base = held.contest.base
    console.print(
        f"{len(held.contest.traffic.arrivals):,} online requests, {held.load:.0%} of what can be done of them; "
        f"alone: TTFT {base.ttft_mean:.3f} s (P99 {base.ttft_p99:.3f}), TBT {base.tbt_mean:.4f} s "
        f"(P99 {base.tbt_p99:.4f}), {base.violations:.1%} outside the SLO",
        style="dim",
    )
    if held.load > 1:
        console.print("more online requests come than can be done; there is nothing to spare", style="yellow")


def _outcome(row: dict[str, Any], is_none: bool) -> str:
    if is_none:
        return "no setting keeps the bounds with a batch beside online requests"
    return f"{row['offline_tokens_per_s']:,.0f} tokens/s of the batch"


def _table(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    names = (
        "policy",
        "batch tokens/s",
        "all/online",
        "of spare",
        "TTFT",
        "P99",
        "TBT",
        "P99",
        "violations",
        "preempted",
    )
    cells = [
        [
            row["policy"],
            f"{row['offline_tokens_per_s']:,.0f}",
            "" if row["total_over_online"] is None else f"{row['total_over_online']:.2f}",
            "" if row["share_of_spare"] is None else f"{row['share_of_spare']:.1%}",
            f"{row['ttft_mean']:.3f} s",
            f"{row['ttft_p99']:.3f} s",
            f"{row['tbt_mean']:.4f} s",
            f"{row['tbt_p99']:.4f} s",
            f"{row['violations']:.2%}",
            f"{row['preemptions']:,}",
        ]
        for row in sorted(rows, key=lambda each: -each["offline_tokens_per_s"])
    ]
    return names, cells
