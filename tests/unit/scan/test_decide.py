"""The scan driven step by step by a small engine: what it promises whatever the lengths turn out to be."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.arrays import Column, column
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import Seen, see
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree
from engine_ext.scan.decide import DualScan
from engine_ext.scan.ends import fresh_tokens
from engine_ext.scan.events import FINISHED, LEFT_OUT, PREFILLED, RETRACTED
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.state import Backlog, StepCosts
from engine_ext.scan.sweep import end_sweep
from engine_ext.scan.tuning import ALIGNMENT
from tests.unit.scan.driving import ask_scan as decide

# So that a full cache takes about as long to read as 250 tokens take to compute.
COSTS = StepCosts(gemm_s=2.5e-6, read_s=6.4e-8, weights_s=1e-4, capacity=20_000, most_tokens=2048)


def backlog(
    prompt: Column,
    known: Column,
    left: Column,
    right: Column,
    groups: Groups | None = None,
    seen: Seen | None = None,
) -> Backlog:
    groups = groups or Groups.unlike(np.zeros(len(prompt), np.int64), np.array([-1]))
    seen = seen or Seen.nothing(len(groups))
    return Backlog(prompt, prompt, known, np.full(len(prompt), 1 << 17), left, right, groups, seen)


def tell(scan: DualScan, kind: int, request: int, value: int = 0) -> None:
    scan.tell(np.array([[kind, request, value]]))


@dataclass
class Engine:
    """Prefills in order of admission, decodes a token per step, retracts the newest when the KV cache is full."""

    scan: DualScan
    prompt: Column
    output: Column
    capacity: int
    left_to_prefill: dict[int, int] = field(default_factory=dict[int, int])
    decoding: dict[int, int] = field(default_factory=dict[int, int])
    generated: dict[int, int] = field(default_factory=dict[int, int])
    done: list[int] = field(default_factory=list[int])
    admitted: list[int] = field(default_factory=list[int])
    kv_held: list[int] = field(default_factory=list[int])
    step_tokens: list[int] = field(default_factory=list[int])
    retractions: int = 0

    @property
    def used(self) -> int:
        running = [*self.decoding, *self.left_to_prefill]
        return sum(int(self.prompt[r]) + self.generated.get(r, 0) for r in running)

    def step(self) -> None:
        decoding_kv = sum(int(self.prompt[r]) + n for r, n in self.decoding.items())
        pending = sum(self.left_to_prefill.values())
        found = decide(self.scan, self.used, decoding_kv, len(self.decoding), pending)
        for request in found.admitted.tolist():
            assert request not in self.left_to_prefill
            assert request not in self.decoding
            self.left_to_prefill[request] = int(self.prompt[request]) + self.generated.get(request, 0)
            self.admitted.append(request)
        self.step_tokens.append(found.budget + len(self.decoding))
        for request in list(self.decoding):
            self.decoding[request] += 1
            self.generated[request] = self.decoding[request]
        self._prefill(found.budget)
        for request, tokens in list(self.decoding.items()):
            if tokens >= self.output[request]:
                del self.decoding[request]
                tell(self.scan, FINISHED, request, tokens)
                self.done.append(request)
        while self.used > self.capacity and len(self.decoding) > 1:
            request = list(self.decoding)[-1]
            tell(self.scan, RETRACTED, request, self.decoding.pop(request))
            self.retractions += 1
        self.kv_held.append(self.used)
        self.check()

    def check(self) -> None:
        """What the scan keeps in sums is what it would find by counting."""
        state, waits = self.scan.state, self.scan.waiting
        assert waits + self.scan.running + len(self.done) == len(self.prompt)
        assert state.totals[0].decoding == len(self.decoding)
        own = sum(int(self.prompt[r]) + self.generated.get(r, 0) for r in self.left_to_prefill)
        own += sum(int(self.prompt[r]) + n for r, n in self.decoding.items())
        # A request that has just been prefilled gets its first token by the clock one decision early.
        assert abs(int(state.totals[0].own_kv) - own) <= 2 * len(self.decoding) + 1
        unknown = column(state.requests, "known") < 0
        assert int(column(state.unknown, "requests").sum()) == (waits if unknown.all() else 0)
        pending = sum(self.prompt[r] + self.generated.get(r, 0) for r in self.left_to_prefill if state.requests[r].side)
        assert state.totals[0].right_pending == pending

    def _prefill(self, budget: int) -> None:
        for request in list(self.left_to_prefill):
            taken = min(budget, self.left_to_prefill[request])
            budget -= taken
            self.left_to_prefill[request] -= taken
            if self.left_to_prefill[request] == 0:
                del self.left_to_prefill[request]
                self.decoding[request] = self.generated.get(request, 0)
                tell(self.scan, PREFILLED, request)

    def run(self, most_steps: int = 200_000) -> None:
        for _ in range(most_steps):
            if self.scan.waiting + self.scan.running == 0:
                return
            self.step()
        raise AssertionError(f"{self.scan.waiting} wait and {self.scan.running} run after {most_steps} steps")


def engine(backlogged: Backlog, output: Column, costs: StepCosts = COSTS) -> Engine:
    return Engine(DualScan.of(backlogged, costs), backlogged.prompt, output, costs.capacity)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 60), st.booleans(), st.floats(0, 1), st.booleans())
def test_every_request_ends_once_whatever_is_known(
    seed: int, count: int, known: bool, share: float, bursts: bool
) -> None:
    generator = np.random.default_rng(seed)
    prompt, output = generator.integers(1, 3000, count), generator.integers(1, 400, count)
    ends = int(share * count)
    run = engine(
        backlog(prompt, output if known else np.full(count, -1), np.arange(ends), np.arange(count - 1, ends - 1, -1)),
        output,
        COSTS._replace(bursts=bursts),
    )
    run.run()
    assert sorted(run.done) == list(range(count))


def two_sided(count: int, known: bool, seed: int = 0, costs: StepCosts = COSTS) -> Engine:
    """Half are long prompts with answers of 8 tokens, half short ones with about 600; a few have been seen."""
    generator = np.random.default_rng(seed)
    prompt = np.concatenate([generator.integers(300, 900, count), generator.integers(20, 60, count)])
    output = np.concatenate([np.full(count, 8), generator.integers(300, 900, count)])
    groups = Groups.unlike(np.repeat([1, 2], count), np.array([-1, 0, 0]))
    given_outputs = output if known else np.full(2 * count, -1)
    sample = np.array([0, 1, 2, count, count + 1, count + 2, count + 3, count + 4])
    seen = see(groups, sample, output[sample], np.ones(len(sample), np.bool_))
    left, right = np.arange(count), np.arange(2 * count - 1, count - 1, -1)
    return engine(backlog(prompt, given_outputs, left, right, groups, seen), output, costs)


@pytest.mark.parametrize("known", [True, False])
def test_both_ends_are_used_up_together(known: bool) -> None:
    """The pace is that of what remains, so neither side is left over for the end."""
    run = two_sided(400, known)
    run.run()
    last_left = max(place for place, request in enumerate(run.admitted) if request < 400)
    last_right = max(place for place, request in enumerate(run.admitted) if request >= 400)
    assert min(last_left, last_right) > 0.8 * len(run.admitted)


def test_known_lengths_fill_the_cache_and_are_hardly_ever_retracted() -> None:
    run = two_sided(400, known=True)
    run.run()
    assert run.retractions <= 4
    middle = run.kv_held[len(run.kv_held) // 4 : len(run.kv_held) // 2]
    assert max(run.kv_held) <= COSTS.capacity
    assert np.mean(middle) > 0.7 * COSTS.capacity


def test_learned_lengths_make_retraction_the_exception() -> None:
    run = two_sided(400, known=False)
    run.run()
    assert run.retractions < 0.03 * 800


def test_large_steps_are_multiples_of_the_alignment() -> None:
    prompt, output = np.array([5000] * 20 + [10]), np.array([5] * 20 + [500])
    scan = DualScan.of(backlog(prompt, output, np.arange(20), np.array([20])), COSTS)
    sizes = [3 + decide(scan, 3000, 3000 * n, decoding=3, pending=1000).budget for n in range(1, 40)]
    large = [size for size in sizes if size >= 2 * ALIGNMENT]
    assert len(large) > 10
    assert all(size % ALIGNMENT == 0 for size in large)


@pytest.mark.parametrize(("weights", "tokens"), [(200, 200), (300, 3 * ALIGNMENT)])
def test_small_steps_fill_the_time_of_reading_the_weights(weights: int, tokens: int) -> None:
    """There a tile more or less costs nothing, while tokens that are left out are lost."""
    costs = COSTS._replace(weights_s=weights * COSTS.gemm_s)
    scan = DualScan.of(backlog(np.array([5000, 10]), np.array([5, 20]), np.array([0]), np.array([1])), costs)
    assert decide(scan, used_kv=20, decoding_kv=20, decoding=1, pending=1000).budget == tokens - 1


@pytest.mark.parametrize(("decoding_kv", "tokens"), [(20, 200), (10_000, 256)])
def test_no_hurry_makes_a_step_longer_than_its_reads(decoding_kv: int, tokens: int) -> None:
    """One answer takes longer than all prompts; a longer step would only give it fewer tokens meanwhile."""
    costs = COSTS._replace(weights_s=200 * COSTS.gemm_s)
    scan = DualScan.of(backlog(np.array([5000, 10]), np.array([5, 500]), np.array([0]), np.array([1])), costs)
    assert decide(scan, used_kv=20, decoding_kv=decoding_kv, decoding=1, pending=1000).budget == tokens - 1


@pytest.mark.parametrize(("waiting", "is_paced"), [(400, False), (40_000, True)])
def test_what_ends_before_the_longest_answer_could_is_not_paced(waiting: int, is_paced: bool) -> None:
    """One answer in a hundred has 20,000 tokens, so it takes 2 s of reading the weights, and others 100."""
    answers = np.array([100] * 99 + [20_000])
    groups = Groups.unlike(np.zeros(waiting, np.int64), np.array([-1]))
    seen = see(groups, np.arange(100), answers, np.ones(100, bool))
    prompt, queue = np.full(waiting, 500), np.arange(waiting)
    work = backlog(prompt, np.full(waiting, -1), queue[: waiting // 2], queue[waiting // 2 :], groups, seen)
    scan = DualScan.of(work, COSTS._replace(read_s=2e-9))
    compute_s, memory_s = scan.remaining_s
    assert (max(compute_s, memory_s) > 2) == is_paced
    budget = decide(scan, used_kv=2000, decoding_kv=1_000_000, decoding=4, pending=1000).budget
    reads_as_tokens = round(1_000_000 * 2e-9 / COSTS.gemm_s)
    assert (budget < reads_as_tokens - 5) == is_paced  # those that decode, and rounding


def test_budget_follows_the_ratio_of_what_remains() -> None:
    run = two_sided(2000, known=True)
    for _ in range(600):
        run.step()
    compute = np.mean(run.step_tokens[300:]) * COSTS.gemm_s
    reads = np.mean(run.kv_held[300:]) * COSTS.read_s
    left, memory = run.scan.remaining_s
    # The weights' floor may ask for more than the ratio does.
    wanted = max(left / memory * reads, COSTS.weights_s)
    assert compute == pytest.approx(wanted, rel=0.25, abs=ALIGNMENT * COSTS.gemm_s / 2)


def test_prompts_come_as_soon_as_enough_fit_where_a_prefill_stops_decoding() -> None:
    """The cache stays full to the end of both ends, because each step that decodes reads all the weights."""
    run = two_sided(2000, known=True, costs=COSTS._replace(bursts=True))
    prompts: list[int] = []
    while run.scan.waiting:
        decoding = len(run.decoding)
        run.step()
        prompts.append(run.step_tokens[-1] - decoding)
    held = np.array(run.kv_held) / COSTS.capacity
    assert set(prompts) == {0, COSTS.most_tokens}
    assert np.mean(held[50:]) > 0.87
    assert np.min(held[50:]) > 0.6  # at the pace of the remaining work it sinks to 0.2 at the end


def decoding_one(costs: StepCosts, prompt: list[int], known: list[int], tiers: list[int] | None = None) -> DualScan:
    """Return a scan in which request 0 decodes; the last one waits at the right end, the others at the left."""
    columns = np.array(prompt), np.array(known)
    ends = np.arange(1, len(prompt) - 1), np.array([0, len(prompt) - 1])
    scan = DualScan.of(replace(backlog(*columns, *ends), tier=np.array(tiers or [0] * len(prompt))), costs)
    [first, *_] = decide(scan, 0, 0, 0, 0, slots=1).admitted.tolist()
    assert first == 0
    tell(scan, PREFILLED, 0)
    return scan


def test_a_chunked_prompt_goes_on_though_its_prefix_was_expected_in_the_cache() -> None:
    scan = decoding_one(COSTS._replace(bursts=True), [100, 19_950, 19_950], [5_000, 10, 10], [0, 5, 5])
    assert decide(scan, 100, 100, 1, 0).budget == 0  # neither prompt fits
    assert decide(scan, 4_100, 100, 1, 4_000).budget == COSTS.most_tokens


def test_urgent_requests_pass_one_that_does_not_fit_where_a_prefill_stops_decoding() -> None:
    prompt, known = [100, 17_000, *[200] * 8, 19_950], [5_000, 4_000, *[10] * 8, 10]
    scan = decoding_one(COSTS._replace(bursts=True), prompt, known, [0] * 10 + [5])
    assert 2 in decide(scan, 100, 100, 1, 0).admitted.tolist()


@pytest.mark.parametrize(("slots", "begins"), [(7, False), (8, True)])
def test_prompts_wait_for_an_eighth_of_the_slots_where_a_prefill_stops_decoding(slots: int, begins: bool) -> None:
    scan = decoding_one(COSTS._replace(bursts=True), [100] * 200, [50] * 200)
    assert (decide(scan, 6_000, 6_000, 64 - slots, 0, slots=slots).budget > 0) == begins


def test_remaining_work_is_exact_where_lengths_are_known() -> None:
    prompt, output = np.array([100, 2000, 30]), np.array([50, 10, 400])
    scan = DualScan.of(backlog(prompt, output, np.array([1]), np.array([2, 0])), COSTS)
    compute, memory = scan.remaining_s
    assert compute == pytest.approx(float((prompt + output).sum()) * COSTS.gemm_s)
    assert memory == pytest.approx(float((prompt * output + output * output / 2).sum()) * COSTS.read_s)


def test_what_runs_long_raises_what_is_expected_of_those_that_wait() -> None:
    """Nothing has ended; twenty requests only turn out longer than the prior."""
    count = 50
    costs = StepCosts(5e-5, 6.4e-8, 8e-3, 1_000_000)
    scan = DualScan.of(backlog(np.full(count, 10), np.full(count, -1), np.empty(0, np.int64), np.arange(count)), costs)
    for request in decide(scan, 0, 0, 0, 0).admitted[:20].tolist():
        tell(scan, PREFILLED, request)
    before = float(scan.state.outlook.rest[0, 0])
    for _ in range(1500):
        decide(scan, 20_000, 20_000, 20, 0)
    assert scan.state.outlook.rest[0, 0] > 3 * before


def test_answers_of_a_group_tell_of_its_sibling() -> None:
    count = 200
    groups = Groups.unlike(np.repeat([1, 2], count // 2), np.array([-1, 0, 0]))
    scan = DualScan.of(
        backlog(np.full(count, 10), np.full(count, -1), np.arange(100), np.arange(199, 99, -1), groups),
        StepCosts(2.5e-6, 6.4e-8, 1e-4, 1_000_000),
    )
    running = [request for request in decide(scan, 0, 0, 0, 0).admitted.tolist() if request < 100]
    for request in running:
        tell(scan, PREFILLED, request)
        tell(scan, FINISHED, request, 4000)
    for _ in range(20):
        decide(scan, 0, 0, 0, 0)
    assert scan.state.outlook.rest[1, 0] == pytest.approx(4000, rel=0.1)
    assert scan.state.outlook.rest[2, 0] == pytest.approx(4000, rel=0.2)


def test_remaining_work_holds_what_was_just_admitted() -> None:
    prompt, output = np.full(10, 100), np.full(10, 500)
    scan = DualScan.of(backlog(prompt, output, np.arange(5), np.arange(9, 4, -1)), COSTS)
    before = scan.remaining_s[1]
    for request in decide(scan, 0, 0, 0, 0).admitted.tolist():
        tell(scan, PREFILLED, request)
    for _ in range(10):
        decide(scan, 1000, 1000, 10, 0)
        assert scan.remaining_s[1] == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("decoded", [0, 1, 2])
def test_any_clock_leaves_nothing_behind(decoded: int) -> None:
    """Engines count a request's first token at its prefill or not, and decode none, one or more a step."""
    generator = np.random.default_rng(0)
    count = 300
    scan = DualScan.of(
        backlog(generator.integers(1, 500, count), np.full(count, -1), np.arange(150), np.arange(299, 149, -1)), COSTS
    )
    for _ in range(10_000):
        for request in decide(scan, 0, 0, 0, 0, decoded).admitted.tolist():
            tell(scan, PREFILLED, request)
            tell(scan, FINISHED, request, int(generator.integers(1, 50)))
        if scan.waiting == 0:
            break
    assert scan.waiting + scan.running == 0
    assert scan.state.totals[0].own_kv == 0
    assert scan.state.totals[0].right_pending == 0


def test_each_end_shares_with_the_one_before_it_there() -> None:
    prompts = Prompts.of([[1] * 100 + [n] for n in range(2, 8)])
    tree = build_tree(prompts)
    assert fresh_tokens(tree, prompts.lengths, np.arange(6), 3).tolist() == [101, 1, 1, 1, 1, 101]


def test_a_request_that_was_left_out_has_fewer_tokens() -> None:
    scan = DualScan.of(backlog(np.array([10]), np.array([50]), np.arange(0), np.array([0])), COSTS)
    assert decide(scan, 0, 0, 0, 0).admitted.tolist() == [0]
    tell(scan, PREFILLED, 0)
    for _ in range(5):
        decide(scan, 10, 10, 1, 0)
    before, held = output_tokens(scan.state, np.array([0])), scan.state.totals[0].own_kv
    tell(scan, LEFT_OUT, 0, 3)
    assert output_tokens(scan.state, np.array([0])) == before - 3
    assert scan.state.totals[0].own_kv == held - 3


def test_a_retraction_is_counted_as_work_again() -> None:
    scan = DualScan.of(backlog(np.full(2, 1000), np.full(2, 50), np.array([0]), np.array([1])), COSTS)
    before = scan.remaining_s[0]
    for request in decide(scan, 0, 0, 0, 0).admitted.tolist():
        tell(scan, PREFILLED, request)
    tell(scan, RETRACTED, 0, 10)
    tell(scan, RETRACTED, 1, 10)
    end_sweep(scan.state)
    end_sweep(scan.state)  # the first still held what was found in the middle of a sweep
    # All prompts again, the ten tokens of each as part of them, and forty to come.
    assert scan.remaining_s[0] == pytest.approx(before)


def test_a_request_larger_than_the_cache_still_gets_its_turn_when_alone() -> None:
    scan = DualScan.of(backlog(np.array([50_000]), np.array([5]), np.array([0]), np.empty(0, np.int64)), COSTS)
    assert decide(scan, 0, 0, 0, 0).admitted.tolist() == [0]


def test_a_retracted_request_is_the_next_one() -> None:
    scan = DualScan.of(backlog(np.full(4, 100), np.full(4, 50), np.array([0, 1]), np.array([3, 2])), COSTS)
    first = decide(scan, 0, 0, 0, 0).admitted.tolist()
    assert sorted(first) == [0, 1, 2, 3]
    tell(scan, PREFILLED, 2)
    tell(scan, RETRACTED, 2, 7)
    assert scan.waiting == 1
    assert decide(scan, 300, 300, 3, 0).admitted.tolist() == [2]


def test_retracting_for_ever_keeps_every_request() -> None:
    """Requests go in from the far end of the right queue and come back at its front, a thousand times."""
    scan = DualScan.of(backlog(np.full(3, 10), np.full(3, 50), np.empty(0, np.int64), np.array([0, 1, 2])), COSTS)
    for _ in range(1000):
        for request in decide(scan, 0, 0, 0, 0).admitted.tolist():
            tell(scan, PREFILLED, request)
            tell(scan, RETRACTED, request, 1)
        assert scan.waiting == 3
    assert sorted(decide(scan, 0, 0, 0, 0).admitted.tolist()) == [0, 1, 2]
