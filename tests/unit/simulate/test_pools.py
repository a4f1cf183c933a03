"""Two engines in pools, or side by side: nothing is lost between them, and each policy does what its name says."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate.pair import ON_PAIRS, ONLINE_PD, POOLED, Pair, play_pools, run_pair
from benchmarks.simulate.rows import batch_alone
from engine_ext.arrays import column
from engine_ext.coserve.limit import Profiled
from engine_ext.coserve.slo import SloClass
from engine_ext.errors import InputError
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import at_rate
from engine_ext.simulate.colocate import OURS, run
from engine_ext.simulate.contest import Contest, Within
from engine_ext.simulate.measured import Measured, Settings
from engine_ext.simulate.shared_engine import DECODE, DONE, PREFILL, SharedEngine
from tests.unit.simulate.test_colocate import COST, LARGE, SLO, SMALL

pytestmark = pytest.mark.slow  # rivals on two engines; compiling them takes half a minute


@cache
def pair(batch: int = 600, rate: float = 8.0) -> Pair:
    generator = np.random.default_rng(1)
    arrivals = at_rate(np.sort(generator.uniform(0.0, 60.0, 300)), rate, 10.0, generator)
    count = len(arrivals)
    shared = [[(f"document {k % 20}", 300), (k, int(generator.integers(20, 900)))] for k in range(batch)]
    online = [[(f"online {k}", int(generator.integers(20, 1500)))] for k in range(count)]
    output = np.concatenate([generator.integers(1, 200, batch), generator.integers(1, 60, count)])
    return Pair.of(Prompts.of_segments([*shared, *online]), output, np.full(batch, 4096), arrivals)


def measure(policy: str, slo: SloClass = SLO, batch: int = 6000, **settings: Any) -> Measured:
    return run_pair(pair(batch), COST, LARGE, policy, Settings(**settings), slo)


@pytest.mark.parametrize("policy", POOLED)
def test_no_token_is_lost_between_two_engines(policy: str) -> None:
    """With small KV caches and a tight limit, so that requests are preempted and computed again."""
    whole = pair().whole
    settings = Settings(profiled=Profiled(0.008), reserved=0.1)
    played, caches = play_pools(whole, COST, SMALL, POOLED[policy], settings)
    relaxed, strict = played.engines
    state = column(relaxed.requests, "state")
    runs = np.flatnonzero((state == PREFILL) | (state == DECODE))
    places = np.concatenate([_on(relaxed), _on(strict)])
    assert sorted(places.tolist()) == runs.tolist()
    for engine, kv in zip(played.engines, caches, strict=True):
        tokens = kv.tokens[0]
        assert tokens.free + tokens.locked + tokens.evictable == SMALL.capacity
        assert min(tokens.free, tokens.locked, tokens.evictable) >= 0
        held = int(column(engine.requests, "held")[_on(engine)].sum())
        assert tokens.locked == held + int(kv.size[1:][kv.users[1:] > 0].sum())
    generated, output = column(relaxed.requests, "generated"), column(relaxed.requests, "output")
    assert np.all(generated[state == DONE] == output[state == DONE])
    assert np.all(state[whole.batch :] == DONE)
    gaps = sum(int(engine.totals[0].gaps) for engine in played.engines)
    assert gaps == int((output[whole.batch :] - 1).sum())
    preempted = sum(int(engine.totals[0].preemptions) for engine in played.engines)
    assert (preempted > 0) == (policy != ONLINE_PD)


def _on(engine: SharedEngine) -> np.ndarray[Any, np.dtype[np.int64]]:
    totals = engine.totals[0]
    return np.concatenate([engine.decoding[: totals.decoding], engine.prefilling[: totals.prefilling]])


def test_only_ooco_decodes_the_batch_on_the_relaxed_engine() -> None:
    """If the strict engine takes nothing of the batch, then only answers of one token end elsewhere."""
    ones = int((pair(6000).whole.output[:6000] == 1).sum())
    assert measure("online-priority", most_decoding=0.0).batch_ended <= ones
    assert measure("ooco", profiled=Profiled(1e-4)).batch_ended > 10 * ones


def test_a_limit_keeps_the_steps_of_the_strict_engine_short() -> None:
    no_slo = SloClass()
    alone = measure(ONLINE_PD, no_slo)
    limited = measure("ooco", no_slo, profiled=Profiled(0.0038))
    free = measure("ooco", no_slo)
    assert (
        alone.tbt_mean < limited.tbt_mean < 1.05 * 0.0038
    )  # the first token after the move waits for more than a step
    assert free.tbt_mean > limited.tbt_mean
    few, many = (measure("online-priority", no_slo, most_decoding=most) for most in (16.0, 512.0))
    assert few.tbt_mean < many.tbt_mean
    assert few.offline_tokens_per_s < many.offline_tokens_per_s


def test_the_halves_have_every_request_once() -> None:
    both = pair()
    assert both.batch == sum(half.batch for half in both.halves)
    assert sum(int(half.lengths.sum()) for half in both.halves) == int(both.whole.lengths.sum())
    times = np.sort(np.concatenate([half.arrivals.arrives_s for half in both.halves]))
    assert times.tolist() == both.arrivals.arrives_s.tolist()


def test_equal_pairs_run_equally() -> None:
    assert measure("ooco", batch=600) == measure("ooco", batch=600)


def test_a_pair_is_set_like_a_single_engine() -> None:
    """Each policy keeps what it must, and two engines side by side do what each does alone."""
    held = Contest(pair(6000), COST, LARGE, SLO, ON_PAIRS)
    within = Within(violations=0.03)
    ours, pooled = held.best(OURS, within), held.best("ooco", within)
    assert ours is not None
    assert pooled is not None
    assert max(ours.violations, pooled.violations) <= max(0.03, held.base.violations)
    halves = [run(half, COST, LARGE, ours.settings, SLO) for half in pair(6000).halves]
    assert ours.offline_tokens_per_s == pytest.approx(sum(each.offline_tokens_per_s for each in halves))
    assert ours.steps == sum(each.steps for each in halves)


def test_a_batch_alone_on_two_engines_has_no_online_tokens() -> None:
    alone = batch_alone(pair(6000), COST, LARGE)
    assert alone.online_tokens_per_s == 0
    assert alone.offline_tokens_per_s > 0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InputError, match="no policy"):
        measure("disaggregated")
