"""`batchweave plan`: plans a file and reports what the plan says about it."""

import itertools
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.costs.cost import CostModel, Load
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.plan.families import find_families
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import UNKNOWN, group_caps
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.sample import ask_sample
from engine_ext.plan.tree import build_tree
from engine_ext.plan.window import Outputs, Shape, WindowPlan, plan_window
from service.workloads.workload import Workload

ENDS = 0.05  # share of the requests whose density is reported for an end of the scan


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the seconds it took, and the peak memory of this process."""

    plan: WindowPlan
    planning_s: float
    peak_rss_bytes: int


def plan_workload(workload: Workload, cost: CostModel, shape: Shape) -> Planned:
    compile_planner(cost)  # happens on a machine's first plan, and does not count as planning
    started = time.perf_counter()
    plan = plan_window(workload.prompts, workload.outputs, cost, workload.wishes, shape)
    seconds = time.perf_counter() - started
    return Planned(plan, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def compile_planner(cost: CostModel) -> None:
    """Compile the planner by planning a small window in which a split pays off."""
    prompts = [[1] * 500 + [10 + n] * 90 for n in range(20)] + [[100 + n] * 50 for n in range(20)]
    known = np.array([2] * 19 + [4000] + [3000] * 20)
    plan_window(Prompts.of(prompts), Outputs.of_known(known), cost, shape=Shape(keep_sharing=0.5))


def with_sample(workload: Workload, share: float, seed: int) -> Workload:
    """Return the workload as seen by a planner that knows only the lengths of a sample."""
    outputs, generator = workload.outputs, np.random.default_rng(seed)
    tree, lengths = build_tree(workload.prompts), workload.prompts.lengths.astype(np.float64)
    groups = group_requests(tree, outputs.kinds)
    caps, family = group_caps(groups, outputs.caps), find_families(tree)
    chosen, _ = ask_sample(groups, caps, lengths, outputs.known, generator, family, share)
    known = np.full_like(outputs.known, UNKNOWN)
    known[chosen] = outputs.known[chosen]
    return replace(
        workload,
        outputs=Outputs(outputs.caps, known, outputs.kinds, chosen, outputs.known[chosen]),
    )


def facts(planned: Planned, cost: CostModel, replicas: int, deadline_s: NDArray[np.float64]) -> dict[str, Any]:
    """Return what `--json` prints. `sharing` is the share of T_comp that is saved.

    Seconds are for all the work on one replica's machine, hours for the busiest replica. `late_requests` would miss
    their deadline even if everything overlapped; `too_long_requests` do not fit into the KV cache, even alone.
    `longest_answer_s`: what the longest answer alone takes at least.
    """
    plan = planned.plan
    load, order = plan.load, plan.order
    parts = [order[first:last] for first, last in itertools.pairwise(plan.partitions.tolist())]
    busiest = [Load(float(plan.compute_s[each].sum()), 0.0, float(plan.memory_s[each].sum())) for each in parts]
    needed = plan.lengths + plan.estimates.mean
    finite = load.memory_s > 0
    end = max(1, int(ENDS * len(order)))
    return {
        "requests": len(order),
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": int(plan.estimates.mean.sum()),
        "sharing": load.sharing,
        "sharing_kept": plan.sharing_kept,
        "prompt_sharing": plan.sharing,
        "density": load.density if finite else None,
        "density_left": _density(plan, plan.scan.tree.order[:end]),
        "density_right": _density(plan, plan.scan.tree.order[-end:]),
        "t_comp_s": load.compute_s,
        "t_mem_s": load.memory_s,
        "t_ideal_s": load.ideal_s,
        "t_sequential_s": load.practical_s(1.0),
        "longest_answer_s": longest_answer_s(float(plan.estimates.mean.max(initial=0.0)), cost),
        "replicas": replicas,
        "accelerators": replicas * cost.machine.accelerators,
        "hours_ideal": max(each.ideal_s for each in busiest) / 3600,
        "hours_sequential": max(each.practical_s(1.0) for each in busiest) / 3600,
        "late_requests": sum(_late(plan, each, deadline_s) for each in parts),
        "too_long_requests": int(np.count_nonzero(needed > cost.kv_capacity_tokens())),
        "planning_s": planned.planning_s,
        "peak_rss_bytes": planned.peak_rss_bytes,
    }


def longest_answer_s(tokens: float, cost: CostModel) -> float:
    """Return the seconds that an answer of so many tokens takes at least: each step reads the model's weights."""
    return tokens * EngineModel.of(cost, Clock.MIXED).weights_s


def write_order(path: Path, workload: Workload, plan: WindowPlan) -> None:
    """Write one line per request in order of execution: id, replica, side, density and estimated output."""
    densities = plan.density
    replica = np.searchsorted(plan.partitions, np.arange(len(plan.order)), side="right") - 1
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as file:
        for place, request in enumerate(plan.order.tolist()):
            density = float(densities[request])
            line = {
                "id": workload.ids[request],
                "replica": int(replica[place]),
                "side": "right" if plan.right[place] else "left",
                "density": density if np.isfinite(density) else None,
                "output_tokens": round(float(plan.estimates.mean[request]), 1),
                "output_tokens_p90": round(float(plan.estimates.high[request]), 1),
            }
            file.write(msgspec.json.encode(line) + b"\n")
    unfinished.replace(path)


def _late(plan: WindowPlan, requests: NDArray[np.int64], deadline_s: NDArray[np.float64]) -> int:
    """Count the requests of one replica whose work, with all work before it, ends after their deadline."""
    done = np.maximum(np.cumsum(plan.compute_s[requests]), np.cumsum(plan.memory_s[requests]))
    return int(np.count_nonzero(done > deadline_s[requests]))


def _density(plan: WindowPlan, requests: NDArray[np.int64]) -> float | None:
    """Return the density of these requests; None if they read no memory."""
    memory = float(plan.memory_s[requests].sum())
    return float(plan.compute_s[requests].sum()) / memory if memory else None
