"""Carries a step's plan out on a simulated engine, as the plugin does in SGLang.

A prompt has all its KV cache from its admission, and one that is parked keeps it while nobody needs the room.
"""

from engine_ext.compiled import compiled
from engine_ext.coserve.predictor import Load, with_chunk
from engine_ext.coserve.victims import victims
from engine_ext.scan.books import put_back, retracted
from engine_ext.scan.state import State
from engine_ext.simulate.cache import Cache, Heap
from engine_ext.simulate.line import Line, next_online, taken
from engine_ext.simulate.ours import Ours
from engine_ext.simulate.reservation import to_come
from engine_ext.simulate.shared_engine import NOBODY, SharedEngine, admit, leave, needed, room, take_off
from engine_ext.step.plan import StepPlan
from engine_ext.step.tuning import MOST_MADE_WAY
from engine_ext.step.view import View


@compiled
def apply(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    state: State,
    line: Line,
    ours: Ours,
    view: View,
    plan: StepPlan,
    first_online: int,
) -> Load:
    """Say who leaves, who rests, who is admitted, and what each prompt computes; return the step's online work."""
    totals = engine.totals[0]
    left, continues = plan.budget, view.chunk.is_ours and not plan.parks
    tokens = plan.room.tokens - (view.chunk.left if continues else 0)  # the prompt in chunks has its room
    if plan.room.tokens > 0:
        if not continues:
            _drop_parked(engine, cache, heap, state, tokens)
        _make_room(engine, cache, heap, state, tokens, plan.room.must)
    for k in range(len(view.kv)):
        engine.requests[ours.batch[k]].rests = 1 if ours.rests[k] else 0
    if continues and not plan.yields:
        left = _compute_batch(engine, left)
    left, load, reserved = _compute_online(engine, cache, heap, line, ours, left, first_online)
    if plan.yields:
        left = _compute_batch(engine, left)
    left = _admit_batch(engine, cache, heap, state, plan.admitted, left, reserved)
    if left == plan.budget and totals.online_decoding == 0 and plan.left_out == len(view.kv):
        for k in range(len(view.kv)):  # else the step would do nothing
            engine.requests[ours.batch[k]].rests = 0
    return load


@compiled
def _make_room(engine: SharedEngine, cache: Cache, heap: Heap, state: State, tokens: int, must: bool) -> None:
    """Take decodes of the batch off the engine until so many KV tokens are free, unless that would not help."""
    those = victims(state)
    most = _free(engine, cache)
    for k in range(len(those)):
        r = engine.requests[those[k]]
        most += r.prompt + r.generated if r.preempted < MOST_MADE_WAY else 0
    if not must and most < tokens:
        return
    for k in range(len(those)):
        if _free(engine, cache) >= tokens:
            break
        victim = int(those[k])
        if engine.requests[victim].preempted < MOST_MADE_WAY or must:
            take_off(engine, cache, heap, victim, True)
            retracted(state, victim, int(engine.requests[victim].generated))
    engine.totals[0].preempted = 0  # the scan knows of these; the others of a step are for the caller


@compiled
def _drop_parked(engine: SharedEngine, cache: Cache, heap: Heap, state: State, tokens: int) -> None:
    """Take the batch's prompts that were begun off the engine, the last first, until so many KV tokens are free."""
    for k in range(engine.totals[0].prefilling - 1, -1, -1):
        request = int(engine.prefilling[k])
        if engine.requests[request].online == 0 and _free(engine, cache) < tokens:
            leave(engine, cache, heap, request, False)
            put_back(state, request)


@compiled
def _free(engine: SharedEngine, cache: Cache) -> int:
    """Return the KV tokens that are free or evictable, with those of online prompts that are not computed yet."""
    tokens = cache.tokens[0].free + cache.tokens[0].evictable
    for k in range(engine.totals[0].prefilling):
        r = engine.requests[engine.prefilling[k]]
        tokens += r.left if r.online == 1 else 0
    return int(tokens)


@compiled
def _compute_batch(engine: SharedEngine, left: int) -> int:
    """Let the batch's prompts that were begun have their part of so many tokens; return what is left."""
    for k in range(engine.totals[0].prefilling):
        r = engine.requests[engine.prefilling[k]]
        if r.online == 0:
            r.take = min(left, r.left)
            left -= r.take
    return int(left)


@compiled
def _compute_online(
    engine: SharedEngine, cache: Cache, heap: Heap, line: Line, ours: Ours, left: int, first_online: int
) -> tuple[int, Load, float]:
    """Let online prompts have their part of so many tokens, in order of arrival.

    Those that wait are admitted while there is room for them and for what running requests reserve. Returns what is
    left of the tokens, the load of the online requests, and the KV tokens that they reserve.
    """
    totals, requests, reserved, at = engine.totals[0], engine.requests, 0.0, 0
    load = Load(0, 0.0, 0, int(totals.online_decoding), int(totals.online_kv))
    for k in range(totals.decoding):
        if requests[engine.decoding[k]].online == 1:
            reserved += ours.ratio[0] * to_come(engine, int(engine.decoding[k]))
    while left > 0:
        if at < totals.prefilling:
            request = int(engine.prefilling[at])
        else:
            request = next_online(line, first_online)
            if request == NOBODY:
                break
            own = reserved + to_come(engine, request) if totals.decoding + totals.prefilling > 0 else 0.0
            if room(engine, cache) - needed(engine, cache, request) <= own:
                break
            taken(engine, line, request)
            admit(engine, cache, heap, request)
        at += 1
        r = requests[request]
        if r.online == 0:
            continue
        reserved += to_come(engine, request)
        r.take = min(left, r.left)
        left -= r.take
        load = with_chunk(load, int(r.prompt + r.generated - r.left), int(r.take))
    return int(left), load, reserved


@compiled
def _admit_batch(
    engine: SharedEngine, cache: Cache, heap: Heap, state: State, count: int, left: int, reserved: float
) -> int:
    """Admit the first `count` requests of `state.admitted` while tokens and room are left; the others wait again.

    `reserved`: KV tokens that online requests reserve. Returns how many of the `left` tokens are left then.
    """
    kept, requests = count, engine.requests
    for k in range(count):
        request = int(state.admitted[k])
        if left <= 0 or room(engine, cache) - needed(engine, cache, request) <= reserved:
            kept = k
            break
        admit(engine, cache, heap, request)
        requests[request].take = min(left, requests[request].left)
        left -= requests[request].take
    for k in range(count - 1, kept - 1, -1):
        put_back(state, int(state.admitted[k]))
    return int(left)
