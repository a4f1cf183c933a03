"""Says which policies there are for a batch alone: the product's, other systems' orders, and BlendServe as printed."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from benchmarks.simulate.orders import decode_heavy_first, sorted_f
from benchmarks.simulate.paper_order import paper_order
from benchmarks.simulate.paper_scan import new_paper_blend, run_blendserve
from engine_ext.arrays import Column
from engine_ext.costs.engine_model import EngineModel
from engine_ext.plan.order import shared_by_order
from engine_ext.plan.resources import Requests
from engine_ext.simulate.policies import POLICIES as OWN
from engine_ext.simulate.policies import (
    SEARCH,
    Outcome,
    Policy,
    Search,
    Work,
    fresh_engine,
    in_order,
    ordered,
    outcome_of,
    run,
)

MEMORY = (0.4, 0.55, 0.7, 0.85, 1.0)  # shares of the KV memory that BlendServe's sides hold on average; the best counts


def simulate(work: Work, model: EngineModel, policy: str, seed: int = 0, search: Search = SEARCH) -> Outcome:
    """Run a policy, with the best of its settings if it has any. Raises KeyError, TooLarge."""
    return run(work, model, POLICIES[policy], seed, search)


def _blendserve(work: Work, model: EngineModel, seed: int, search: Search) -> Outcome:
    """Run the paper's order (algorithms 1 and 2) and dual scan (algorithm 3), at its best share of the memory."""
    started = work.clock()
    order = paper_order(
        work.tree,
        Requests(work.lengths.astype(np.float64), work.estimates.mean, work.estimates.squares),
        work.cost,
        search.keep,
    )
    fresh = np.empty(len(order), dtype=np.int64)
    fresh[order] = work.lengths[order] - shared_by_order(work.tree, order)
    mean = work.estimates.mean
    compute, memory = work.cost.compute_s(fresh, mean), work.cost.memory_s(work.lengths, mean)
    sample, scan = in_order(work.sample, order), order[~np.isin(order, work.sample)]
    planned_s = work.clock() - started

    def run_at(usable: float) -> Outcome:
        engine, cache = fresh_engine(work, model)
        run_blendserve(
            engine, cache, model.numbers, new_paper_blend(sample, scan, mean, compute, memory, fresh), usable
        )
        return outcome_of("blendserve", f"memory {usable:g}", work, model, engine, cache, planned_s)

    return min((run_at(usable) for usable in MEMORY), key=lambda found: found.seconds)


def _depth_first(work: Work, seed: int) -> Column:
    return work.tree.order


def _sorted_f(work: Work, model: EngineModel, seed: int, search: Search) -> Outcome:
    return ordered("sorted-f", partial(sorted_f, capacity=model.capacity))(work, model, seed, search)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        **OWN,
        "dfs": ordered("dfs", _depth_first),
        "decode-heavy": ordered("decode-heavy", decode_heavy_first),
        "sorted-f": _sorted_f,
        "blendserve": _blendserve,
    }
)
