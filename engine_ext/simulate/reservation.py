"""Says how much room running requests need for their answers, as SGLang 0.5.17 does: a part of what each may get.

That part is the new token ratio, which falls with every step of decodes and rises after a retraction.
"""

from engine_ext.arrays import Floats
from engine_ext.compiled import compiled
from engine_ext.simulate.shared_engine import SharedEngine
from engine_ext.simulate.stock import CLIP, DECAY_STEPS, LEAST_RATIO, RETRACT_STEPS


@compiled
def to_come(engine: SharedEngine, request: int) -> float:
    """Return the most tokens that are kept free for the rest of one answer."""
    r = engine.requests[request]
    return float(min(max(0, r.output - r.generated), CLIP))


@compiled
def adapt(engine: SharedEngine, ratio: Floats, first: float, decoded: int) -> None:
    """Change the ratio, float64 [1] and at first `first`, after a step in which so many requests decoded."""
    totals = engine.totals[0]
    if totals.preempted > 0:
        got, most = 0.0, 1.0
        for k in range(totals.decoding):
            r = engine.requests[engine.decoding[k]]
            got += float(r.generated + RETRACT_STEPS)
            most += float(r.output)
        ratio[0] = min(1.0, got / most)
    elif decoded > 0:
        ratio[0] = max(ratio[0] - first * (1.0 - LEAST_RATIO) / DECAY_STEPS, first * LEAST_RATIO)
