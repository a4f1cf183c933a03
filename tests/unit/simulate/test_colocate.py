"""Online requests beside a batch on the simulated engine: what no scheduler may do, and what ours should do better."""

from functools import cache

import numpy as np
import pytest

from benchmarks.simulate.beside import POLICIES, run, run_on
from engine_ext.arrays import column
from engine_ext.coserve.limit import Profiled
from engine_ext.coserve.predictor import new_predictor
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.errors import InputError, TooLarge
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import PrefixTree, build_tree
from engine_ext.simulate import colocate
from engine_ext.simulate.arrivals import Arrivals, at_rate, denser
from engine_ext.simulate.cache import Cache
from engine_ext.simulate.colocate import OURS, fresh_engine
from engine_ext.simulate.measured import Measured, Settings, tokens_done
from engine_ext.simulate.shared_engine import DECODE, DONE, PREFILL, SharedEngine
from engine_ext.simulate.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # compiling the rivals' loops takes a minute alone

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
LARGE = EngineModel.of(COST, Clock.MIXED)
SMALL = EngineModel(LARGE.gemm_s, LARGE.read_s, LARGE.quadratic_s, LARGE.weights_s, 12_000, clock=Clock.MIXED)
SLO = SloClass(ttft_s=1.0, tpot_s=0.02)


@cache
def traffic(rate: float = 8.0, seconds: float = 10.0, batch: int = 600, group: int = 0) -> Traffic:
    generator = np.random.default_rng(1)
    arrivals = at_rate(np.sort(generator.uniform(0.0, 60.0, 300)), rate, seconds, generator)
    count = len(arrivals)
    shared = [[(f"document {k % 20}", 300), (k, int(generator.integers(20, 900)))] for k in range(batch)]
    online = [[(f"online {k}", int(generator.integers(20, 1500)))] for k in range(count)]
    output = np.concatenate([generator.integers(1, 200, batch), generator.integers(1, 60, count)])
    return Traffic.of(Prompts.of_segments([*shared, *online]), output, np.full(batch, 4096), arrivals, group)


def measure(policy: str, model: EngineModel = SMALL, slo: SloClass = SLO, **settings: object) -> Measured:
    return run(traffic(), COST, model, policy, Settings(**settings), slo)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_token_is_lost_or_counted_twice(policy: str) -> None:
    """With a small KV cache and a tight limit, through preemption and retraction."""
    found = traffic()
    engine, kv = fresh_engine(found, SMALL)
    run_on(engine, kv, found, COST, SMALL, policy, Settings(profiled=Profiled(0.008), rate=5.0), SLO)
    check(engine, kv, SMALL.capacity)
    if policy not in ("online-only", "fcfs", "priority", "hygen-star", "oracle"):
        assert engine.totals[0].preemptions > 0
    generated, output = column(engine.requests, "generated"), column(engine.requests, "output")
    ended = column(engine.requests, "state") == DONE
    assert np.all(generated[ended] == output[ended])
    assert np.all(generated <= output)
    counted = column(engine.requests, "counted")
    assert np.all(counted <= generated)
    assert (counted[: found.batch].sum() > 0) == (policy != "online-only")
    if policy != "fcfs":
        assert np.all(ended[found.batch :])
        assert engine.totals[0].gaps == int((output[found.batch :] - 1).sum())


def test_a_batch_counts_by_the_work_that_is_done() -> None:
    tree, output = tree_of([[1] * 100, [2] * 100]), np.array([10, 1000])

    def done(*generated: int) -> float:
        return tokens_done(tree, output, np.array(generated), COST)

    def work_s(answer: int) -> float:
        reads = SMALL.read_s * (100 * answer + answer**2 / 2)
        return SMALL.gemm_s * (100 + answer) + SMALL.quadratic_s * 100**2 + reads

    assert (done(0, 0), done(10, 1000)) == (0.0, pytest.approx(1210.0))
    assert done(10, 0) == pytest.approx(done(0, 10))  # the same tokens, though the second answer has more to come
    assert done(0, 500) == pytest.approx(1210 * work_s(500) / (work_s(10) + work_s(1000)))
    assert tokens_done(tree, output, np.zeros(0, dtype=np.int64), COST) == 0.0


def test_a_shared_prefix_counts_once() -> None:
    output = np.array([1, 1, 1])
    tree = tree_of([[1] * 1000 + [2], [1] * 1000 + [3], [4] * 1000 + [5]])
    two, third = (tokens_done(tree, output, np.array(generated), COST) for generated in ((1, 1, 0), (0, 0, 1)))
    assert two + third == pytest.approx(3006.0)
    assert two == pytest.approx(third, rel=0.01)  # two that share are about as much work as one alone


def tree_of(prompts: list[list[int]]) -> PrefixTree:
    return build_tree(Prompts.of(prompts))


def check(engine: SharedEngine, kv: Cache, capacity: int) -> None:
    """All KV tokens are free, locked or evictable, and what is locked belongs to those who run."""
    tokens, state = kv.tokens[0], column(engine.requests, "state")
    assert tokens.free + tokens.locked + tokens.evictable == capacity
    assert min(tokens.free, tokens.locked, tokens.evictable) >= 0
    runs = (state == PREFILL) | (state == DECODE)
    held = int(column(engine.requests, "held")[runs].sum())
    assert tokens.locked == held + int(kv.size[1:][kv.users[1:] > 0].sum())
    assert engine.totals[0].decoding + engine.totals[0].prefilling == np.count_nonzero(runs)


def test_ours_gives_the_batch_most_within_every_bound() -> None:
    alone = measure("online-only")
    ours = measure(OURS)
    assert ours.violations <= alone.violations + 0.01
    assert ours.offline_tokens_per_s > 0
    for rival in ("priority", "vllm-priority", "sarathi-offline"):
        found = measure(rival)
        assert found.violations > 0.5 or found.offline_tokens_per_s < ours.offline_tokens_per_s
    hygen = [measure("hygen", profiled=Profiled(limit_s)) for limit_s in (0.006, 0.01, 0.02)]
    kept = [found.offline_tokens_per_s for found in hygen if found.violations <= ours.violations]
    assert kept
    assert ours.offline_tokens_per_s >= max(kept)


def test_each_bound_is_judged_by_itself() -> None:
    """More requests keep a bound on the mean of their gaps than the same bound on each gap."""
    free = measure("vllm-priority", slo=SloClass())
    bound_s = (free.tbt_mean + free.tbt_p99) / 2
    mean, every = (measure("vllm-priority", slo=slo) for slo in (SloClass(tpot_s=bound_s), SloClass(tbt_s=bound_s)))
    assert free.violations == 0
    assert mean.violations < every.violations
    assert measure("vllm-priority", slo=SloClass(ttft_s=1e-6)).violations == 1


def test_a_limit_keeps_every_step_beside_online_requests_short() -> None:
    found, no_slo = traffic(batch=6000), SloClass()
    alone = run(found, COST, LARGE, "online-only", Settings(), no_slo)
    ours = run(found, COST, LARGE, OURS, Settings(profiled=Profiled(0.005)), no_slo)
    free = run(found, COST, LARGE, OURS, Settings(), no_slo)
    assert ours.tbt_p99 <= max(0.005, alone.tbt_p99) * 1.01
    assert free.tbt_mean > ours.tbt_mean
    assert ours.offline_tokens_per_s > 0


def test_a_limit_holds_for_the_last_chunk_of_a_long_prompt_too() -> None:
    """Each chunk attends to all tokens before it, so the later ones of a prompt may hold fewer tokens."""
    arrivals = at_rate(np.linspace(0.0, 19.5, 40), 2.0, 20.0, np.random.default_rng(1))
    segments = [[(k, 30_000)] for k in range(40)] + [[(f"online {k}", 50)] for k in range(len(arrivals))]
    output = np.full(40 + len(arrivals), 100)
    found = Traffic.of(Prompts.of_segments(segments), output, np.full(40, 4096), arrivals)
    ours = run(found, COST, LARGE, OURS, Settings(profiled=Profiled(0.006)), SloClass())
    assert ours.tbt_p99 <= 0.006 * 1.01
    assert ours.offline_tokens_per_s > 0


def test_first_tokens_come_soon_where_steps_with_online_prompts_leave_batches_out() -> None:
    found, no_slo = traffic(batch=6000), SloClass()
    alone = run(found, COST, LARGE, "online-only", Settings(), no_slo)
    free = run(found, COST, LARGE, OURS, Settings(), no_slo)
    ours = run(found, COST, LARGE, OURS, Settings(profiled=Profiled(prompts_alone=True)), no_slo)
    assert ours.ttft_mean - alone.ttft_mean < (free.ttft_mean - alone.ttft_mean) / 2
    assert ours.offline_tokens_per_s > 0.5 * free.offline_tokens_per_s


def test_a_burst_is_served_as_if_there_were_no_batch() -> None:
    """Three seconds in which fifty times as many online requests come as before and after."""
    generator = np.random.default_rng(2)
    times = np.sort(np.concatenate([generator.uniform(0, 9, 9), generator.uniform(3, 6, 150)]))
    arrivals = Arrivals(times, np.arange(len(times)), np.zeros(len(times), dtype=np.int64), 9.0)
    batch = [[(k, 500)] for k in range(4000)]
    online = [[(f"online {k}", 600)] for k in range(len(times))]
    output = np.concatenate([np.full(4000, 40), np.full(len(times), 60)])
    burst = Traffic.of(Prompts.of_segments([*batch, *online]), output, np.full(4000, 4096), arrivals)
    ours, alone = (run(burst, COST, LARGE, policy, Settings(), SLO) for policy in (OURS, "online-only"))
    assert ours.violations <= alone.violations + 0.01
    assert ours.offline_tokens_per_s > 0


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_wrong_cost_model_breaks_no_slo_and_changes_the_harvest_little(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost model says 0.8 or 1.25 times what steps take, until the predictor has learned better."""
    alone, right = measure("online-only"), measure(OURS)
    times = ("gemm_s", "read_s", "quadratic_s", "weights_s")
    believed = new_predictor(SMALL.numbers._replace(**{name: getattr(SMALL, name) * factor for name in times}))
    whole = colocate.new_memory
    monkeypatch.setattr(colocate, "new_memory", lambda *given: whole(*given)._replace(predictor=believed))
    found = measure(OURS)
    assert believed.observed[0] > 100
    assert found.violations <= alone.violations + 0.01
    assert 0.8 * right.offline_tokens_per_s < found.offline_tokens_per_s < 1.1 * right.offline_tokens_per_s


@pytest.mark.parametrize("policy", ["fcfs", "vllm-priority", "bros", OURS])
def test_a_group_of_a_batch_begins_when_the_one_before_has_ended(policy: str) -> None:
    found = traffic(group=50)
    engine, kv = fresh_engine(found, SMALL)
    run_on(engine, kv, found, COST, SMALL, policy, Settings(), SLO)
    first_s, last_s = (column(engine.requests, name)[: found.batch].reshape(-1, 50) for name in ("first_s", "last_s"))
    begun = int(np.count_nonzero(first_s.any(axis=1)))
    assert begun > 1
    for group in range(1, begun):
        assert first_s[group][first_s[group] > 0].min() > last_s[group - 1].max()


def test_equal_input_gives_equal_runs() -> None:
    assert measure(OURS) == measure(OURS)


def test_arrivals_are_thinned_or_repeated_to_a_rate() -> None:
    generator = np.random.default_rng(0)
    times = np.sort(generator.uniform(0, 1000, 5000))
    for rate in (0.5, 5.0, 17.0):
        found = at_rate(times, rate, 400.0, np.random.default_rng(1))
        assert found.rate == pytest.approx(rate, rel=0.1)
        assert np.all(np.diff(found.arrives_s) >= 0)
        assert len(set(zip(found.number.tolist(), found.copy.tolist(), strict=True))) == len(found)
    busy = denser(found, 100.0, 200.0, 3, generator)
    inside = np.count_nonzero((found.arrives_s >= 100) & (found.arrives_s < 200))
    assert len(busy) == len(found) + 2 * inside
    for wrong in ((times[:0], 1.0), (times, 0.0), (times[::-1], 1.0)):
        with pytest.raises(InputError):
            at_rate(*wrong, 10.0, generator)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="choose from"):
        measure("nonsense")
    tiny = EngineModel(1e-6, 1e-8, 0.0, 1e-3, 500, clock=Clock.MIXED)
    with pytest.raises(TooLarge):
        measure(OURS, tiny)
