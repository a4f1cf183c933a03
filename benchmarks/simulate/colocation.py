"""Compares schedulers for online requests beside a batch, on one engine or on two."""

import json
from typing import Any

from batchweave.terminal import print_table
from benchmarks.simulate.beside import POLICIES
from benchmarks.simulate.pair import ON_PAIRS, PAIR_POLICIES, POOLED, Pair
from benchmarks.simulate.rows import batch_alone, row_of
from engine_ext.costs.cost import CostModel
from engine_ext.simulate.contest import Contest
from service.cli.profile_slo import COMPILES, say_load
from service.cli.workload_files import console
from service.errors import WorkloadError
from service.workloads.colocation import Given, Wanted, alone_line, put_beside

POOLS = "strict:1,relaxed:1"


def policies_of(names: str | None, pools: bool) -> list[str]:
    """Return the policies of a list separated by commas, or all that suit. Raises WorkloadError for an unknown one.

    `pools`: whether there are two engines, on which those for one engine run side by side.
    """
    suiting = PAIR_POLICIES if pools else tuple(POLICIES)
    found = list(suiting) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise WorkloadError(f"no policies are named; choose from {', '.join(suiting)}")
    for name in found:
        if name in POOLED and not pools:
            raise WorkloadError(f"{name} is for two engines; give --pools {POOLS}")
        if name not in (*suiting, *POLICIES):
            raise WorkloadError(
                f"no policy {name!r} for online requests beside a batch; choose from {', '.join(suiting)}"
            )
    return found


def parse_pools(text: str | None) -> bool:
    """Return whether two engines are wanted. Raises WorkloadError for other pools than one engine of each kind."""
    if text is None:
        return False
    if sorted(part.strip() for part in text.split(",")) != sorted(POOLS.split(",")):
        raise WorkloadError(f"--pools {text!r}: only one engine of each kind is simulated; give --pools {POOLS}")
    return True


def compare(
    files: tuple[Given, Given],
    cost: CostModel,
    wanted: Wanted,
    load: float | None,
    seed: int,
    names: list[str],
    pools: bool,
    as_json: bool,
) -> None:
    """Run the named schedulers one after another, and print a row for each. Raises WorkloadError."""
    console.print(COMPILES, style="dim")
    beside = put_beside(files, cost, load, seed, 2 if pools else 1)
    given = beside.prompts, beside.output, beside.caps, beside.arrivals
    traffic = Pair.of(*given) if pools else beside.traffic
    contest = Contest(traffic, cost, beside.model, wanted.slo, ON_PAIRS if pools else POLICIES)
    say_load(alone_line(contest, beside.load), beside.load)
    within, alone = wanted.within(contest.base), batch_alone(traffic, cost, beside.model)
    rows: list[dict[str, Any]] = []
    for name in names:
        best = contest.best(name, within)
        rows.append(row_of("simulate", beside.load, files[1].file.name, contest.base, best, name, alone))
        console.print(f"{name}: {_outcome(rows[-1], best is None)}", style="dim")
        if best is not None and best.batch_ended == traffic.batch:
            console.print(
                f"{name} ended the whole batch before the last arrival, so its figure says little; give a longer batch",
                style="yellow",
            )
    if as_json:
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        print_table(*_table(rows))


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
