"""Foresees how long a new online request would wait, which the worker asks before it takes one (worker/shedding.py).

Prompts of a stronger class go first, so each class has a wait of its own. It is at least as long as the oldest prompt
of the class, or of a stronger one, has waited: that one may be waiting for room in the KV cache, and not for steps.
"""

import time
from itertools import takewhile
from typing import Any

from engine_ext.coserve.predictor import Load, predict
from engine_ext.coserve.slo import FLEX, PRIORITY
from engine_ext.plugin.marks import slo_of
from engine_ext.plugin.pulse import Foreseen
from engine_ext.plugin.scheduler.admission import Admission
from engine_ext.plugin.scheduler.online import length, uncomputed_tokens
from engine_ext.plugin.scheduler.radix import cached_tokens
from engine_ext.plugin.scheduler.step_load import load_of_decodes

LOOKED_UP = 8  # waiting prompts whose cached part is looked up; the others count as if as much of them were cached


def foresee(ours: Admission, scheduler: Any, running: list[Any], now: float) -> Foreseen:
    """Return what a new online request would meet after the step that has just been decided, `now`.

    `running`: all that decode.
    """
    model, most = ours.beside.memory.predictor, ours.most_prompt_tokens(scheduler, 0)
    decoding = [req for req in running if req not in ours.running and not req.finished()] if ours.online_runs else []
    load = load_of_decodes(decoding)
    full = Load(most, float(most) ** 2, 1, load.decoding, load.kv_tokens)
    token_s = float(predict(model, full)) / most
    # Who waits will decode soon, so that a burst is seen before it does.
    soon = [*decoding, *scheduler.waiting_queue][: scheduler.max_running_requests]
    step_s = float(predict(model, load_of_decodes(soon)))
    waiting = list(takewhile(lambda req: slo_of(req) != FLEX, scheduler.waiting_queue))
    first = [req for req in waiting if slo_of(req) == PRIORITY]
    begun, share = _begun_tokens(ours, scheduler), _uncached_share(scheduler, waiting)

    def wait_s(prompts: list[Any]) -> float:
        if not prompts and begun == 0:
            return 0.0
        # One that was retracted has lived for longer than it has waited.
        paces = (ours.beside.paces.get(req) for req in prompts if not req.output_ids)
        oldest_s = max((now - pace.arrived_s for pace in paces if pace is not None), default=0.0)
        return max(oldest_s, token_s * (begun + share * sum(map(length, prompts))))

    return Foreseen(time.monotonic(), step_s, token_s, wait_s(first), wait_s(waiting))


def _begun_tokens(ours: Admission, scheduler: Any) -> int:
    """Return the tokens that are left of an online prompt that is being computed, which goes before all others."""
    continued = scheduler.chunked_req
    return 0 if continued is None or continued in ours.running else uncomputed_tokens(continued)


def _uncached_share(scheduler: Any, waiting: list[Any]) -> float:
    looked_up = waiting[:LOOKED_UP]
    tokens = sum(map(length, looked_up))
    cached = sum(cached_tokens(scheduler.tree_cache, req, touches=False).tokens for req in looked_up)
    return 1.0 - cached / tokens if tokens else 1.0
