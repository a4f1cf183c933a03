"""Divides a step between online requests and batches, as `decide` does before it asks the scan."""

from typing import Any

import numpy as np

from engine_ext.arrays import Bools, Column
from engine_ext.coserve.predictor import Load
from engine_ext.step.decide import Share, share
from engine_ext.step.view import NO_DECODES, NO_LOAD, batches_alone


def divide(
    beside: Any,
    demand: Any,
    now: float,
    kv: Column = NO_DECODES,
    fixed: Load = NO_LOAD,
    largest: int = 2048,
) -> tuple[Share, Bools]:
    """Return the step's share, and which of the decodes with these KV tokens rest; `fixed` decode in any case."""
    needs, bounds = beside.needs(demand, now)
    view = batches_alone(0, 0, 0, 0, largest=largest)._replace(online=needs, bounds=bounds, is_limited=True)
    view, rests = view._replace(fixed=fixed, kv=kv, skipped=np.zeros_like(kv)), np.zeros(len(kv), dtype=np.bool_)
    return share(beside.memory, view, rests, True), rests
