"""`batchweave plan`: a file planned, and what the plan says of it."""

import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.cost import CostModel
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import Seen, group_caps, look_ahead
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.sample import choose_sample
from engine_ext.plan.tree import build_tree
from engine_ext.plan.window import UNKNOWN, Outputs, Shape, WindowPlan, plan_window
from service.workloads.workload import Workload

ENDS = 0.05  # of the requests, whose density stands for an end of the scan


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the seconds it took and the most memory that this process has held."""

    plan: WindowPlan
    planning_s: float
    peak_rss_bytes: int


def plan_workload(workload: Workload, cost: CostModel, shape: Shape) -> Planned:
    # A small one first: compiling, on a machine's first plan, is not planning.
    plan_window(Prompts.of([[1, 2], [1, 3]]), Outputs.of_known(np.array([1, 2])), cost)
    started = time.perf_counter()
    plan = plan_window(workload.prompts, workload.outputs, cost, workload.wishes, shape)
    seconds = time.perf_counter() - started
    return Planned(plan, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def with_sample(workload: Workload, share: float, seed: int) -> Workload:
    """The workload as a planner sees it that knows the lengths of a sample alone."""
    outputs, generator = workload.outputs, np.random.default_rng(seed)
    groups = group_requests(build_tree(workload.prompts), outputs.kinds)
    nothing = look_ahead(Seen.nothing(len(groups)), groups, group_caps(groups, outputs.caps))
    lengths = workload.prompts.lengths.astype(np.float64)
    unknown = np.full_like(outputs.known, UNKNOWN)
    chosen = choose_sample(groups, nothing, lengths, unknown, generator, share)
    chosen = chosen[outputs.known[chosen] != UNKNOWN]
    unknown[chosen] = outputs.known[chosen]
    return replace(
        workload,
        outputs=Outputs(outputs.caps, unknown, outputs.kinds, chosen, outputs.known[chosen]),
    )


def facts(planned: Planned, cost: CostModel, replicas: int) -> dict[str, Any]:
    """What `--json` prints. Times are of one replica's machine; `sharing` is the share of T_comp that is saved."""
    plan = planned.plan
    load, order = plan.load, plan.order
    finite = load.memory_s > 0
    end = max(1, int(ENDS * len(order)))
    return {
        "requests": len(order),
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": int(plan.estimates.mean.sum()),
        "sharing": load.sharing,
        "sharing_kept": plan.scan.sharing_kept,
        "prompt_sharing": plan.sharing,
        "density": load.density if finite else None,
        "density_left": _density(plan, plan.scan.tree.order[:end]),
        "density_right": _density(plan, plan.scan.tree.order[-end:]),
        "t_comp_s": load.compute_s,
        "t_mem_s": load.memory_s,
        "t_ideal_s": load.ideal_s,
        "t_sequential_s": load.practical_s(1.0),
        "replicas": replicas,
        "accelerators": replicas * cost.machine.accelerators,
        "hours_ideal": load.ideal_s / replicas / 3600,
        "hours_sequential": load.practical_s(1.0) / replicas / 3600,
        "planning_s": planned.planning_s,
        "peak_rss_bytes": planned.peak_rss_bytes,
    }


def write_order(path: Path, workload: Workload, plan: WindowPlan) -> None:
    """One line a request in order of execution: id, replica, side, density and estimated output."""
    replica = np.searchsorted(plan.partitions, np.arange(len(plan.order)), side="right") - 1
    with path.open("wb") as file:
        for place, request in enumerate(plan.order.tolist()):
            density = float(plan.density[request])
            line = {
                "id": workload.ids[request],
                "replica": int(replica[place]),
                "side": "right" if plan.right[place] else "left",
                "density": density if np.isfinite(density) else None,
                "output_tokens": round(float(plan.estimates.mean[request]), 1),
                "output_tokens_p90": round(float(plan.estimates.high[request]), 1),
            }
            file.write(msgspec.json.encode(line) + b"\n")


def _density(plan: WindowPlan, requests: NDArray[np.int64]) -> float | None:
    """None where these requests read no memory."""
    memory = float(plan.memory_s[requests].sum())
    return float(plan.compute_s[requests].sum()) / memory if memory else None
