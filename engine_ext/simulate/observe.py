"""Reads from a simulated engine all that a step is decided by."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools
from engine_ext.compiled import compiled
from engine_ext.coserve.predictor import Load
from engine_ext.coserve.reserve import reserve
from engine_ext.coserve.slo import deadline
from engine_ext.simulate.cache import Cache, missing
from engine_ext.simulate.line import Line, nth_online, waiting_online
from engine_ext.simulate.ours import AHEAD_S, Ours, Rules, bounds_of, strictest_of
from engine_ext.simulate.reservation import to_come
from engine_ext.simulate.shared_engine import SharedEngine, needed
from engine_ext.step.view import Chunk, Online, View


class Decodes(NamedTuple):
    """Those that decode: how many of the `batch`, and of online requests with deadlines (`due`).

    `slack_s`: the least time until the next token of an online one is due. `reserved`: KV tokens for their answers.
    """

    batch: int
    due: int
    slack_s: float
    reserved: float


@compiled
def look(engine: SharedEngine, cache: Cache, line: Line, ours: Ours, rules: Rules, first_online: int) -> View:
    """Return what the engine holds, and note the batch's decodes in `ours`."""
    totals, here = engine.totals[0], np.zeros(len(rules.may_wait), dtype=np.bool_)
    decodes, chunk = _decodes(engine, ours, rules, here), _chunk(engine)
    online = _online(engine, cache, line, ours, rules, first_online, decodes, here)
    kv = ours.kv[: decodes.batch]
    return View(
        online,
        chunk,
        True,
        strictest_of(rules, here),
        Load(0, 0.0, 0, int(totals.online_decoding), int(totals.online_kv)),
        kv,
        ours.skipped[: decodes.batch],
        int(totals.decoding),
        int(totals.online_kv + kv.sum()),
        int(ours.decoded[0]),
        int(cache.tokens[0].locked - chunk.left),
        _kept_free(ours, int(totals.online_locked), float(totals.now_s)),
        1,
        len(engine.requests),
        rules.chunk,
        rules.mixes,
    )


@compiled
def _decodes(engine: SharedEngine, ours: Ours, rules: Rules, here: Bools) -> Decodes:
    """Note the batch's decodes in `ours`, and in `here` the classes with deadlines of the others."""
    totals, count, due, least, reserved = engine.totals[0], 0, 0, np.inf, 0.0
    for k in range(totals.decoding):
        request = int(engine.decoding[k])
        r = engine.requests[request]
        if r.online == 1:
            if not rules.may_wait[r.slo]:
                due, here[r.slo] = due + 1, True
                least = min(least, _slack(engine, rules, request))
            reserved += ours.ratio[0] * to_come(engine, request)
        else:
            ours.batch[count], ours.kv[count], ours.skipped[count] = request, r.prompt + r.generated, r.skipped
            count += 1
    return Decodes(count, due, least, reserved)


@compiled
def _chunk(engine: SharedEngine) -> Chunk:
    """Return the prompt that is being computed, as one with others of the same kind that were begun.

    SGLang has one at a time. Here a prompt of the batch that was parked for an online one keeps its KV cache.
    """
    left, computed, is_ours = 0, 0, True
    for k in range(engine.totals[0].prefilling):
        r = engine.requests[engine.prefilling[k]]
        if left == 0 or (is_ours and r.online == 1):
            left, computed, is_ours = r.left, r.prompt + r.generated - r.left, r.online == 0
        elif (r.online == 0) == is_ours:
            left += r.left
    is_ours &= left > 0
    return Chunk(int(left), int(computed), bool(is_ours), bool(is_ours), bool(is_ours), bool(is_ours))


@compiled
def _online(
    engine: SharedEngine,
    cache: Cache,
    line: Line,
    ours: Ours,
    rules: Rules,
    first_online: int,
    decodes: Decodes,
    here: Bools,
) -> Online:
    """Return what online requests need, and note the classes of their prompts in `here`, as `online.py` of the plugin
    does it in SGLang.
    """
    totals, tokens, before, prompts, first_slack_s = engine.totals[0], 0, 0, 0, np.inf
    due, due_length, reserved = 0, 0, decodes.reserved
    for k in range(totals.prefilling):
        request = int(engine.prefilling[k])
        r = engine.requests[request]
        if r.online == 1:
            before = r.prompt + r.generated - r.left if prompts == 0 else before
            tokens += r.left
            reserved += to_come(engine, request)
            if _is_due(engine, ours, rules, request, here):
                due, due_length = due + 1, due_length + r.prompt + r.generated
                first_slack_s = min(first_slack_s, _slack(engine, rules, request))
            prompts += 1
    kv = first = tokens
    first += reserved if prompts > 0 else 0
    waiting = waiting_online(line)
    for place in range(waiting):
        request = nth_online(line, first_online, place)
        r = engine.requests[request]
        if _is_due(engine, ours, rules, request, here):
            due, due_length = due + 1, due_length + r.prompt + r.generated
            first_slack_s = min(first_slack_s, _slack(engine, rules, request))
        if tokens >= rules.chunk:
            continue
        uncached = max(1, missing(cache, int(r.leaf)) + r.generated)
        if place == 0:
            before = before if prompts > 0 else r.prompt + r.generated - uncached
            first = kv + needed(engine, cache, request) + reserved + to_come(engine, request)
        kv += uncached
        tokens += uncached
        reserved += to_come(engine, request)
    prompts += waiting
    tokens = min(tokens, rules.chunk)
    # Where others may wait, nobody knows what of a prompt is cached.
    due_tokens = tokens if due == prompts else min(tokens, due_length)
    return Online(
        int(decodes.due),
        int(due),
        int(prompts),
        int(waiting),
        int(tokens),
        int(due_tokens),
        int(before),
        int(kv),
        int(first),
        int(reserved),
        float(decodes.slack_s),
        float(first_slack_s),
    )


@compiled
def _is_due(engine: SharedEngine, ours: Ours, rules: Rules, request: int, here: Bools) -> bool:
    """Return whether a prompt has a deadline; if it bounds the step, note its class in `here`."""
    slo = int(engine.requests[request].slo)
    if rules.may_wait[slo]:
        return False
    here[slo] |= not ours.memory.in_vain[0]  # else prompts wait for batches to end, and not for the step
    return True


@compiled
def _slack(engine: SharedEngine, rules: Rules, request: int) -> float:
    """Return the seconds until the next token of the request is due."""
    r = engine.requests[request]
    due_s = deadline(bounds_of(rules, int(r.slo)), r.arrives_s, r.first_s, r.last_s, r.generated)
    return float(due_s - engine.totals[0].now_s)


@compiled
def _kept_free(ours: Ours, locked: int, now_s: float) -> int:
    """Return the KV tokens to keep free for online requests, which have locked so many now."""
    if len(ours.ahead) == 0:
        return int(reserve(ours.memory.held))
    return max(0, int(ours.ahead[min(int(now_s / AHEAD_S), len(ours.ahead) - 1)]) - locked)
