"""Says in a row what a policy's best run gave a batch and online requests; `Measured` explains the fields."""

import math
from dataclasses import replace
from typing import Any

from benchmarks.simulate.pair import Pair, run_pair
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.simulate.colocate import OURS, run
from engine_ext.simulate.contest import CHUNKS
from engine_ext.simulate.measured import Measured, Settings
from engine_ext.simulate.traffic import Traffic

FIELDS = (
    *("suite", "load", "offline", "policy", "online_tokens_per_s", "offline_tokens_per_s", "total_over_online"),
    *("share_of_spare", "ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99", "normalized_latency", "ttft_attained"),
    *("tpot_attained", "violations", "preemptions", "recomputed_tokens", "restored_tokens", "limit_s"),
)


def batch_alone(traffic: Traffic | Pair, cost: CostModel, model: EngineModel) -> Measured:
    """Return our run of the batch with no online request."""
    settings, no_slo = Settings(chunk=max(CHUNKS)), SloClass()
    if isinstance(traffic, Pair):
        return run_pair(traffic.without_online(), cost, model, OURS, settings, no_slo)
    return run(traffic.without_online(), cost, model, settings, no_slo)


def row_of(
    suite: str, load: float, offline: str, base: Measured, best: Measured | None, policy: str, alone: Measured
) -> dict[str, Any]:
    """Return FIELDS of a policy's best run; nothing is done for the batch if no run keeps the bounds.

    `load`: the share of what the engine can do of the online work. `alone`: the batch without online requests.
    """
    found = replace(base, offline_tokens_per_s=0.0) if best is None else best
    limit_s = found.settings.profiled.limit_s
    spare = alone.offline_tokens_per_s * max(0.0, 1.0 - load)
    known: dict[str, Any] = {
        "suite": suite,
        "load": load,
        "offline": offline,
        "policy": policy,
        "total_over_online": _ratio(base.online_tokens_per_s + found.offline_tokens_per_s, base.online_tokens_per_s),
        "share_of_spare": _ratio(found.offline_tokens_per_s, spare),
        "limit_s": limit_s if math.isfinite(limit_s) else None,
    }
    return {name: known[name] if name in known else getattr(found, name) for name in FIELDS}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
