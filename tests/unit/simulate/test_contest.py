"""Settings of policies are found by bisection, and only runs that keep the bounds count."""

import numpy as np
import pytest

from benchmarks.simulate.beside import ORACLE, POLICIES
from benchmarks.simulate.rows import FIELDS, batch_alone, row_of
from engine_ext.coserve.slo import SloClass
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.contest import PLACES, Contest, Within, online_capacity
from tests.unit.simulate.test_colocate import COST, LARGE, SLO, traffic

pytestmark = pytest.mark.slow


def contest(slo: SloClass) -> Contest:
    return Contest(traffic(batch=6000), COST, LARGE, slo, POLICIES)


def test_the_harshest_setting_that_keeps_a_bound_is_found() -> None:
    held = contest(SloClass())
    within = Within(most={"tbt_p99": held.base.tbt_p99 * 1.3})
    best = held.best("hygen", within)
    tried = [settings.chunk for policy, settings in held.runs if policy == "hygen"]
    assert best is not None
    assert sorted(set(tried)) == [held.base.settings.chunk, 256]  # its own and the next larger one
    assert all(tried.count(chunk) < PLACES / 4 for chunk in tried)
    assert best.tbt_p99 <= within.most["tbt_p99"]
    again = len(held.runs)
    assert held.best("hygen", within) == best
    assert len(held.runs) == again


def test_online_alone_may_have_the_chunk_that_hides_behind_the_weights() -> None:
    held = contest(SloClass())
    assert held.chunks == (192, 256, 512, 1024, 2048)
    alone = [found for (policy, _), found in held.runs.items() if policy == "online-only"]
    assert len(alone) == 5
    assert held.base.normalized_latency == min(found.normalized_latency for found in alone)


def test_what_breaks_a_bound_does_not_count() -> None:
    held = contest(SloClass())
    assert held.best("vllm-priority", Within(most={"tbt_mean": 0.0})) is None
    row = row_of("test", 0.3, "batch", held.base, None, "vllm-priority", held.base)
    assert tuple(row) == FIELDS
    assert row["offline_tokens_per_s"] == 0.0
    assert row["total_over_online"] == 1.0


def test_the_oracle_is_never_behind_ours() -> None:
    held = contest(SLO)
    within = Within(violations=0.01)
    ours, oracle = held.best(OURS, within), held.best(ORACLE, within)
    assert ours is not None
    assert oracle is not None
    assert oracle.offline_tokens_per_s >= ours.offline_tokens_per_s


def test_a_batch_alone_has_no_online_tokens() -> None:
    found = traffic(batch=6000)
    alone = batch_alone(found, COST, LARGE)
    assert alone.online_tokens_per_s == 0
    assert alone.offline_tokens_per_s > 0


def test_the_capacity_is_what_the_engine_does_of_a_flood() -> None:
    from engine_ext.plan.prompts import Prompts

    prompts = Prompts.of_segments([[(k, 500)] for k in range(400)])
    rate = online_capacity(prompts, np.full(400, 50), COST, LARGE)
    ideal = 1.0 / (550 * COST.gemm_s_per_token)
    assert rate == pytest.approx(ideal, rel=0.5)
    assert rate < ideal
