"""The scan of an engine to which requests come and go."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.memory import Profile
from engine_ext.plan.prompts import Prompts, TokenIds
from engine_ext.plan.resources import Requests
from engine_ext.plan.tree import build_tree, common_prefix
from engine_ext.scan.backlog import AtOnce, Executor, Plan
from engine_ext.scan.ends import two_ends
from engine_ext.scan.projects import NOBODY, Owner
from engine_ext.scan.state import StepCosts
from engine_ext.scan.tuning import FEWEST_CHANGES
from engine_ext.step.live import LiveScan
from tests.unit.scan.driving import decide

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
COSTS = StepCosts(gemm_s=2.5e-6, read_s=6.4e-8, weights_s=1e-4, capacity=20_000, most_tokens=2048)


@dataclass
class Engine:
    """Prefills in order of admission, with the last fifty prompts cached, and decodes a token per step."""

    scan: LiveScan
    prompts: dict[int, TokenIds] = field(default_factory=dict[int, TokenIds])
    outputs: dict[int, int] = field(default_factory=dict[int, int])
    prefilling: dict[int, int] = field(default_factory=dict[int, int])
    decoding: dict[int, int] = field(default_factory=dict[int, int])
    got: dict[int, int] = field(default_factory=dict[int, int])
    done: list[int] = field(default_factory=list[int])
    admitted: list[int] = field(default_factory=list[int])
    cached: list[TokenIds] = field(default_factory=list[TokenIds])
    most_at_once: int = 1 << 30
    mixes: bool = True
    steps: int = 0
    now: float = 0.0
    slowness: float = 1.0
    ended: dict[int, float] = field(default_factory=dict[int, float])
    refuses: list[int] = field(default_factory=list[int])  # these, four times each
    refused: Counter[int] = field(default_factory=Counter[int])

    def add(
        self,
        key: int,
        prompt: TokenIds,
        output: int,
        known: bool = False,
        due: float = math.inf,
        profile: Profile | None = None,
        owner: Owner = NOBODY,
    ) -> None:
        self.prompts[key], self.outputs[key] = prompt, output
        self.scan.add(key, prompt, 4096, output if known else UNKNOWN, due=due, profile=profile, owner=owner)

    @property
    def used(self) -> int:
        return sum(len(self.prompts[key]) + self.got.get(key, 0) for key in [*self.decoding, *self.prefilling])

    def fresh(self, prompt: TokenIds) -> int:
        return len(prompt) - max((common_prefix(each, prompt) for each in self.cached), default=0)

    def step(self) -> None:
        self.steps += 1
        reads = sum(len(self.prompts[key]) + tokens for key, tokens in self.decoding.items())
        slots = self.most_at_once - len(self.decoding) - len(self.prefilling)
        pending = sum(self.prefilling.values())
        step = decide(self.scan, self.used, reads, len(self.decoding), pending, 1, slots, self.now, mixes=self.mixes)
        assert len(step.admitted) <= slots
        for key in step.admitted:
            assert key not in self.prefilling
            assert key not in self.decoding
            if key in self.refuses and self.refused[key] < 4:
                self.refused[key] += 1
                self.scan.put_back(key, refused=True)
                continue
            self.prefilling[key] = max(1, self.fresh(self.prompts[key]) + self.got.get(key, 0))
            self.admitted.append(key)
        for key in list(self.decoding):
            self.decoding[key] += 1
            self.got[key] = self.decoding[key]
        budget, decoding = step.budget, len(self.decoding)
        for key in list(self.prefilling):
            taken = min(budget, self.prefilling[key])
            budget -= taken
            self.prefilling[key] -= taken
            if self.prefilling[key] == 0:
                del self.prefilling[key]
                self.cached = [*self.cached[-50:], self.prompts[key]]
                self.decoding[key] = self.got.get(key, 0)
                self.scan.prefilled(key)
        compute_s = COSTS.gemm_s * (decoding + step.budget - budget)
        self.now += self.slowness * max(compute_s, COSTS.weights_s, reads * COSTS.read_s)
        for key, tokens in list(self.decoding.items()):
            if tokens >= self.outputs[key]:
                del self.decoding[key]
                self.scan.finished(key, tokens)
                self.done.append(key)
                self.ended[key] = self.now

    def retract(self, key: int) -> None:
        self.scan.retracted(key, self.decoding.pop(key))

    def run(self, most_steps: int = 50_000) -> None:
        for _ in range(most_steps):
            if not self.decoding and not self.prefilling and len(self.scan) == 0:
                return
            self.step()
        raise AssertionError(f"{len(self.scan)} wait after {most_steps} steps")


class LatePlan(Future[Plan]):
    """A plan that is made at once, and ready only when it has been asked for so many times."""

    def __init__(self, plan: Plan, times: int) -> None:
        super().__init__()
        self.set_result(plan)
        self.times = times

    def done(self) -> bool:
        self.times -= 1
        return self.times < 0


class Late:
    """Makes plans that are ready some steps after they were begun, as a thread does."""

    def __init__(self, generator: np.random.Generator, most_steps: int) -> None:
        self.generator, self.most_steps = generator, most_steps

    def submit(self, fn: Callable[..., Plan], /, *given: Any) -> Future[Plan]:
        return LatePlan(fn(*given), int(self.generator.integers(0, self.most_steps + 1)))


def live(share: float = 0.01, executor: Executor | None = None) -> LiveScan:
    return LiveScan(COST, COSTS, share, executor=executor or AtOnce())


def assert_consistent(scan: LiveScan, running: set[int], waiting: set[int]) -> None:
    """Each request that a plan has stands once where it should, and the sums are those of the requests."""
    found = scan._scan  # pyright: ignore[reportPrivateUsage]
    scan.next_keys  # noqa: B018 # tells the scan what it does not know yet
    state, at = found.state, scan._at  # pyright: ignore[reportPrivateUsage]
    queued = [
        member.key
        for side in range(2)
        for place in state.waiting[side, state.queues[side].first : state.queues[side].last].tolist()
        if state.requests[place].gone == 0 and (member := at(place)) is not None
    ]
    assert len(set(queued)) == len(queued) == found.waiting
    assert set(queued) <= waiting
    assert len(scan) == len(waiting)
    runs = [member.key for place in state.running[: found.running].tolist() if (member := at(place)) is not None]
    assert sorted(runs) == sorted(running)
    if found.running == 0:
        assert state.totals[0].own_kv == state.totals[0].pending_tokens == state.totals[0].decoding == 0


def tokens(*parts: tuple[int, int]) -> TokenIds:
    """Parts of (content, length)."""
    return np.concatenate([np.random.default_rng(seed).integers(0, 1 << 20, n, np.uint32) for seed, n in parts])


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 80), st.booleans(), st.sampled_from([0, 3, 60]))
def test_every_request_ends_once_whenever_it_comes(seed: int, count: int, known: bool, late: int) -> None:
    """Some are retracted, some refused, some taken back while they wait, some given up while they run.

    All of this may happen while a plan is being made.
    """
    generator = np.random.default_rng(seed)
    engine, gone = Engine(live(executor=Late(generator, late)), most_at_once=20), set[int]()
    engine.refuses = generator.permutation(count)[: count // 8].tolist()
    for key in range(count):
        prompt = tokens((int(generator.integers(3)), 50), (100 + key, int(generator.integers(1, 800))))
        engine.add(key, prompt, int(generator.integers(1, 300)), known)
        for _ in range(int(generator.integers(0, 20))):
            engine.step()
        if engine.decoding and generator.random() < 0.3:
            engine.retract(int(generator.choice(list(engine.decoding))))
        if engine.decoding and generator.random() < 0.1:
            given_up = int(generator.choice(list(engine.decoding)))
            engine.scan.dropped(given_up, engine.decoding.pop(given_up))
            gone.add(given_up)
        waiting = set(engine.prompts) - set(engine.done) - set(engine.prefilling) - set(engine.decoding) - gone
        if waiting and generator.random() < 0.1:
            taken = int(generator.choice(sorted(waiting)))
            engine.scan.take_back(taken)
            gone.add(taken)
        active = {*engine.decoding, *engine.prefilling}
        assert_consistent(engine.scan, active, set(engine.prompts) - set(engine.done) - active - gone)
    engine.run()
    assert sorted([*engine.done, *gone]) == list(range(count))
    scan = engine.scan._scan  # pyright: ignore[reportPrivateUsage]
    assert (scan.running, scan.state.totals[0].own_kv) == (0, 0)


def test_it_plans_again_when_enough_has_come_and_not_in_every_step() -> None:
    engine = Engine(live())
    for key in range(2000):
        engine.add(key, tokens((key, 100)), 50)
        if key % 10 == 0:
            engine.step()
    before = engine.scan.plans
    engine.run()
    assert before < 40
    assert engine.scan.plans <= before + 5  # what was learned is worth a few


def test_a_prefix_that_is_being_computed_is_not_computed_beside() -> None:
    """The first of each document goes alone, the others come when it is in the cache; the two ends meet in one."""
    engine, beside, seen = Engine(live()), 0, 0
    for key in range(60):
        engine.add(key, tokens((key // 6, 500), (1000 + key, 20)), 30, known=True)
    computed = set[int]()
    while len(engine.done) < 60:
        before = {key // 6 for key in engine.prefilling}
        engine.step()
        for key in engine.admitted[seen:]:
            beside += key // 6 in before - computed
            before.add(key // 6)
        seen = len(engine.admitted)
        computed |= {key // 6 for key in [*engine.decoding, *engine.done]}
    assert beside <= 1
    assert engine.steps < 400  # a step for each that waits, and no more


def test_a_computed_prefix_is_waited_for_until_it_is_in_the_cache() -> None:
    scan = LiveScan(COST, COSTS)
    document, generator = np.arange(600, dtype=np.uint32), np.random.default_rng(0)
    for key in range(4):
        rest = generator.integers(1000, 9000, 10).astype(np.uint32)
        scan.add(key, np.concatenate([document, rest]), 64, known=8)
    [first] = decide(scan, 0, 0, 0, 0, 0, 64).admitted
    scan.prefilled(first, stored=False)
    assert decide(scan, 610, 610, 1, 0, 1, 64).admitted == []
    scan.stored(first)
    assert len(decide(scan, 611, 611, 1, 0, 1, 64).admitted) == 3


def test_steps_continue_while_a_plan_is_made() -> None:
    """In a thread, as in an engine; only an engine with nothing else to do waits for its plan."""
    with ThreadPoolExecutor(1) as thread:
        engine = Engine(live(executor=thread), most_at_once=20)
        for key in range(500):
            engine.add(key, tokens((key % 5, 100), (100 + key, 50)), 20)
        engine.step()
        assert engine.admitted
        assert engine.scan.plans == 1
        for key in range(500, 2000):
            engine.add(key, tokens((key % 5, 100), (100 + key, 50)), 20)
            engine.step()
        engine.run()
    assert sorted(engine.done) == list(range(2000))
    assert engine.scan.plans > 1


def test_all_ranks_follow_a_plan_in_the_step_that_they_agree_on() -> None:
    """Not even if it is ready as soon as it begins, which on another rank it may not be."""
    engine = Engine(live(executor=Late(np.random.default_rng(0), 0)))
    for key in range(100):
        engine.add(key, tokens((key, 50)), 20)
    engine.step()
    for key in range(100, 300):
        engine.add(key, tokens((key, 50)), 20)

    for _ in range(50):
        decide(engine.scan, engine.used, 0, len(engine.decoding), 0, 1, 0, engine.now, may_follow=False)
    assert (engine.scan.plans, engine.scan.is_ready) == (1, True)
    engine.step()

    assert engine.scan.plans == 2


def test_what_was_learned_outlives_the_plan() -> None:
    engine = Engine(live(share=0.1))
    for key in range(100):
        engine.add(key, tokens((1, 40), (100 + key, 10)), 700)
    engine.run()
    unseen = live().remaining_s
    assert unseen == (0.0, 0.0)
    for key in range(1000, 1000 + 2 * FEWEST_CHANGES):
        engine.add(key, tokens((1, 40), (100 + key, 10)), 700)
    engine.step()
    waiting = 2 * FEWEST_CHANGES
    expected = waiting * (50 * 700 + 700**2 / 2) * COSTS.read_s
    assert engine.scan.remaining_s[1] == pytest.approx(expected, rel=0.15)


def test_what_earlier_batches_taught_is_known_before_any_answer() -> None:
    engine, profile = Engine(live()), Profile.of(np.full(500, 700))
    for key in range(100):
        engine.add(key, tokens((1, 40), (100 + key, 10)), 700, profile=profile)
    engine.step()
    expected = 100 * (50 * 700 + 700**2 / 2) * COSTS.read_s
    assert engine.scan.remaining_s[1] == pytest.approx(expected, rel=0.1)
    engine.run()
    for key in range(1000, 1100):  # another task: its profile says the contrary, and the numbers are given again
        engine.add(key, tokens((2, 40), (100 + key, 10)), 5, profile=Profile.of(np.full(500, 5)))
    engine.step()
    assert engine.scan.remaining_s[1] < expected / 20


def test_those_asked_first_stand_before_all_others() -> None:
    prompts = Prompts.of([[key % 3] * 10 + [100 + key] for key in range(30)])
    lengths = Requests.exact(prompts.lengths, np.where(np.arange(30) % 3 == 0, 2, 400))
    waits, first = np.arange(30) >= 3, np.array([20, 12, 14, 13])
    ends = two_ends(build_tree(prompts), lengths, COST, first, waits)
    assert ends.left[: len(first)].tolist() == first.tolist()
    assert len(ends.right) > 0
    assert sorted([*ends.left.tolist(), *ends.right.tolist()]) == list(range(3, 30))


def test_the_sample_runs_first_even_where_nothing_says_that_answers_are_long() -> None:
    """The long ones are few, and stand at an end whose share of the memory is small while nobody knows of them."""
    engine = Engine(live(share=0.1))
    for key in range(400):
        engine.add(key, tokens((0, 20), (100 + key, 60)), 3)
    for key in range(400, 440):
        engine.add(key, tokens((1, 20), (100 + key, 60)), 900)
    for _ in range(40):
        engine.step()
    assert any(key >= 400 for key in engine.admitted[:60])
    engine.run()


def test_it_plans_again_when_answers_are_not_as_long_as_they_seemed() -> None:
    engine = Engine(live())
    for key in range(600):
        engine.add(key, tokens((key % 2, 20), (100 + key, 60)), 400 if key % 2 else 2)
    engine.step()
    assert engine.scan.plans == 1
    engine.run()
    assert engine.scan.plans >= 3  # nothing came, but answers ended
    assert engine.scan.plans <= engine.steps // 32 + 3


def test_an_engine_needs_nothing_that_is_not_compiled_beforehand() -> None:
    """In a process of its own, for here other tests have compiled much already."""
    code = """
import sys
from engine_ext import warm_up

def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("engine_ext.")]
    found = {id(each): each for module in modules for each in vars(module).values() if hasattr(each, "signatures")}
    return sum(len(each.signatures) for each in found.values())

warm_up.compile_planner()
warm_up.compile_scan()
before = compiled()
from tests.unit.scan.test_live import Engine, live, tokens
engine = Engine(live(), most_at_once=20)
for key in range(80):
    engine.add(key, tokens((key % 3, 50), (100 + key, 200)), 30, known=key % 2 == 0)
    engine.step()
    if key == 40:
        engine.retract(next(iter(engine.decoding)))
        engine.scan.next_keys
        engine.mixes = False
engine.run()
print(before, compiled())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = ran.stdout.split()
    assert int(before) > 10
    assert after == before
