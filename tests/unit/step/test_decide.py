"""What a step does beside online requests, decided from numbers alone."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from engine_ext.arrays import Bools
from engine_ext.coserve.limit import Profiled
from engine_ext.coserve.predictor import Load, with_decodes
from engine_ext.coserve.slo import Bounds
from engine_ext.coserve.tuning import LEAST_CHUNK
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import Seen
from engine_ext.scan.decide import DualScan
from engine_ext.scan.state import Backlog, StepCosts
from engine_ext.step.decide import Share, decide, share
from engine_ext.step.memory import Memory, new_memory
from engine_ext.step.plan import Room, StepPlan
from engine_ext.step.view import NO_CHUNK, NO_ONLINE, Chunk, Online, View, batches_alone

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
MODEL = EngineModel.of_steps(COST, Clock.MIXED).numbers
CAPACITY, LARGEST = 100_000, 2048
BOUNDS = Bounds(1.0, 0.05, math.inf)


@dataclass
class Decided:
    plan: StepPlan
    rests: Bools
    admitted: int


def step(view: View, memory: Memory | None = None, waiting: int = 50, prompt: int = 1000) -> Decided:
    """Decide one step of an engine on which so many requests of a batch wait, with prompts of so many tokens."""
    groups = Groups.unlike(np.zeros(waiting, dtype=np.int64), np.array([-1]))
    prompts, unknown = np.full(waiting, prompt), np.full(waiting, -1)
    half = waiting // 2
    left, right = np.arange(half), np.arange(waiting - 1, half - 1, -1)
    backlog = Backlog(prompts, prompts, unknown, np.full(waiting, 100), left, right, groups, Seen.nothing(1))
    scan, rests = DualScan.of(backlog, StepCosts.of(COST, CAPACITY, LARGEST)), np.zeros(len(view.kv), dtype=np.bool_)
    plan, _ = decide(scan.state, memory or fresh(), view, rests)
    return Decided(plan, rests, int(scan.running))


def divided(view: View) -> Share:
    """Return how a step is divided between online requests and batches."""
    return share(fresh(), view, np.zeros(len(view.kv), dtype=np.bool_), True)


def fresh(profiled: Profiled | None = None, least_share: float = 0.0) -> Memory:
    return new_memory(MODEL, CAPACITY, profiled or Profiled(), least_share)


def beside(
    needs: Online, decodes: int = 0, kv: int = 1000, chunk: Chunk | None = None, used: int = 0, theirs: int = 0
) -> View:
    """The view of an engine with online requests beside `decodes` of a batch, each of `kv` tokens."""
    view = batches_alone(used, kv * decodes, decodes + theirs, 0, largest=LARGEST)
    fixed = Load(0, 0.0, 0, theirs, theirs * 100)
    columns = {"kv": np.full(decodes, kv), "skipped": np.zeros(decodes, dtype=np.int64)}
    view = view._replace(online=needs, is_limited=True, bounds=BOUNDS, fixed=fixed, **columns)
    return view._replace(chunk=chunk or NO_CHUNK)


def prompts(tokens: int, waiting: int = 1, **more: float) -> Online:
    """Online prompts of so many tokens; all of them wait."""
    found = NO_ONLINE._replace(due=1, prompts=1, waiting=waiting, tokens=tokens, due_tokens=tokens, kv=tokens)
    return found._replace(**{"first": tokens, "first_slack_s": 1.0, **more})


def test_online_prompts_have_their_tokens_first() -> None:
    found = step(beside(prompts(500)))
    assert divided(beside(prompts(500))).online == 500
    assert found.plan.budget >= 500
    assert not found.plan.parks
    assert found.admitted == found.plan.admitted > 0


def test_without_online_requests_nothing_is_limited() -> None:
    found = step(batches_alone(0, 0, 0, 0))
    assert found.plan.limit_s == math.inf
    assert found.plan.room == Room(0, False, False)
    assert (found.plan.is_cut, found.plan.parks) == (False, False)
    assert found.plan.budget > 0


def test_a_token_that_is_due_soon_leaves_decodes_of_batches_out() -> None:
    needs = NO_ONLINE._replace(decoding=1, slack_s=0.006)
    found, relaxed = (step(beside(each, 200, 5000, theirs=1)) for each in (needs, needs._replace(slack_s=10.0)))
    assert 0 < found.rests.sum() < 200
    assert found.plan.left_out == found.rests.sum()
    assert found.plan.is_cut
    assert relaxed.plan.left_out == relaxed.rests.sum() < found.rests.sum()


def test_nobody_rests_where_the_kv_cache_might_not_do_for_all() -> None:
    needs = NO_ONLINE._replace(decoding=1, slack_s=0.006)
    found = step(beside(needs, 200, 5000, used=CAPACITY - 300, theirs=1))
    assert found.plan.left_out == found.rests.sum() == 0


def test_decodes_that_may_not_rest_leave_online_prompts_less_of_the_step() -> None:
    view = beside(prompts(1500, decoding=1, slack_s=0.02), 200, 2000, theirs=1)
    fixed = view._replace(fixed=with_decodes(view.fixed, 200, 200 * 2000), kv=view.kv[:0], skipped=view.skipped[:0])
    found, same = (share(fresh(), each, np.zeros(len(each.kv), dtype=np.bool_), False) for each in (view, fixed))
    assert found == same
    assert LEAST_CHUNK < found.online < divided(view).online


def test_a_late_prompt_still_gets_a_page() -> None:
    assert divided(beside(prompts(500, decoding=1, slack_s=-1.0), theirs=1)).online == LEAST_CHUNK


def test_a_limit_that_cuts_prompts_gives_them_less_of_a_step_while_others_decode() -> None:
    view, rests = beside(prompts(1500, decoding=1, slack_s=0.03), theirs=1), np.zeros(0, dtype=np.bool_)

    def online(profiled: Profiled) -> int:
        return share(fresh(profiled), view, rests, True).online

    assert LEAST_CHUNK < online(Profiled(0.01, cuts_prompts=True)) < online(Profiled(0.01)) == online(Profiled())
    nobody = beside(prompts(1500))
    assert share(fresh(Profiled(0.01, cuts_prompts=True)), nobody, rests, True).online == 1500


def test_prompts_that_found_no_room_do_not_stop_batches() -> None:
    memory = fresh(Profiled(prompts_alone=True))
    first = step(beside(prompts(500), 20), memory)
    assert first.plan.left_out == 20
    assert memory.in_vain[0]
    assert step(beside(prompts(500), 20), memory).plan.left_out == 0


def test_what_batches_are_owed_they_get_at_a_chunk_a_time() -> None:
    needs = prompts(LARGEST, first_slack_s=-1.0)
    memory = fresh(Profiled(prompts_alone=True), 1 / 8)
    rests = np.zeros(0, dtype=np.bool_)
    assert share(memory, beside(needs), rests, True).most == LARGEST
    memory.owed_s[0], memory.in_vain[0] = 1.0, False
    assert share(memory, beside(needs), rests, True).most == LARGEST + LARGEST // 8


@pytest.mark.parametrize(
    ("tokens", "chunk", "waiting", "does"),
    [
        (1500, Chunk(2000, 500, True, True, True, True), 1, "yields"),
        (LARGEST, Chunk(2000, 500, True, True, True, True), 1, "parks"),
        (1500, Chunk(100, 500, True, True, True, True), 1, ""),
        (1500, Chunk(2000, 500, True, False, False, True), 1, "yields"),
        (1500, Chunk(2000, 500, True, True, True, False), 1, "parks"),
        (LARGEST, Chunk(2000, 500, True, True, False, True), 1, ""),
        (1500, Chunk(2000, 500, True, True, True, True), 0, ""),
        (1500, Chunk(2000, 500, False, False, False, False), 1, ""),
    ],
    ids=["in the way", "of a long one", "small", "cannot park", "cannot yield", "may not", "nobody waits", "theirs"],
)
def test_a_prompt_of_a_batch_makes_way_for_those_that_wait(tokens: int, chunk: Chunk, waiting: int, does: str) -> None:
    view = beside(prompts(tokens, waiting), chunk=chunk)
    plan, online = step(view).plan, divided(view).online
    assert (plan.parks, plan.yields) == (does == "parks", does == "yields")
    if does == "yields":
        assert online == tokens
        assert 0 < plan.budget - online < chunk.left
    elif chunk.is_ours and waiting and not does:
        assert plan.budget >= min(chunk.left + online, LARGEST)


def test_a_prompt_of_a_batch_parks_where_the_step_has_no_page_for_it() -> None:
    view = beside(prompts(LARGEST - 63), chunk=Chunk(2000, 500, True, True, True, True))._replace(page=64)
    assert step(view).plan.parks
    assert step(view._replace(online=prompts(LARGEST - 64))).plan.yields


def test_a_prompt_of_a_batch_parks_where_yielding_lets_nobody_in() -> None:
    """As where the cache has no room beside it, or SGLang computes tokens that are cached."""
    view, memory = beside(prompts(1500), chunk=Chunk(2000, 500, True, True, True, True)), fresh()
    assert step(view._replace(used=CAPACITY - 3000)).plan.parks
    assert step(view, memory).plan.yields
    assert memory.in_vain[0]  # until a step computes one of them
    assert step(view, memory).plan.parks


def test_a_prompt_of_a_batch_for_which_the_cache_has_no_room_is_parked() -> None:
    """SGLang takes its whole chunk where no room is left, and fails; however often it has made way before."""
    chunk = Chunk(600, 500, True, True, False, True)
    view = batches_alone(0, 10_000, 10, 0, largest=LARGEST)._replace(chunk=chunk)
    assert step(view._replace(used=CAPACITY - 11)).plan.parks
    assert not step(view._replace(used=CAPACITY - 12)).plan.parks


def test_room_is_made_for_the_first_that_waits_and_for_what_is_begun() -> None:
    needs = prompts(700, first=900)
    chunk = Chunk(100, 0, True, True, False, True)
    assert step(beside(needs, 8)).plan.room == Room(900 + 8 + 1 + 1, True, False)
    assert step(beside(needs, 8, chunk=chunk)).plan.room == Room(900 + 8 + 1 + 1 + 100, True, False)
    begun = step(beside(needs._replace(waiting=0), 8, chunk=Chunk(700, 300, False, False, False, False)))
    assert begun.plan.room == Room(900 + 8 + 1 + 1, False, True)


def test_what_online_requests_hold_and_reserve_is_not_for_batches() -> None:
    needs = prompts(500)
    free = step(beside(needs, used=CAPACITY - 3000))
    reserved = step(beside(needs._replace(reserved=1500), used=CAPACITY - 3000))
    kept = step(beside(needs, used=CAPACITY - 3000)._replace(kept_free=1500))
    assert free.admitted > reserved.admitted
    assert kept.admitted == reserved.admitted
