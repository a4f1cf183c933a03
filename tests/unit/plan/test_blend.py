"""The blended order, its partitions and slices."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.plan.blend import NOT_URGENT, Wishes, blend, urgency
from engine_ext.plan.partition import cut_slices, partition

works = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=60)


def sorted_work(found: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Compute and memory seconds in falling density, as a scan has them."""
    ordered = sorted(found, key=lambda each: -each[0] / each[1])
    return np.array([c for c, _ in ordered]), np.array([m for _, m in ordered])


@given(works)
def test_every_beginning_has_the_density_of_the_window(found: list[tuple[float, float]]) -> None:
    compute, memory = sorted_work(found)
    blended = blend(compute, memory, Wishes.none(len(found)), 1.0)
    assert sorted(blended.positions.tolist()) == list(range(len(found)))
    density = compute.sum() / memory.sum()
    excess = (compute - density * memory)[blended.positions]
    # Never further from balance than one request is.
    assert np.all(np.abs(np.cumsum(excess)) <= np.abs(excess).max() + 1e-6)


@given(works)
def test_each_end_is_taken_in_its_order(found: list[tuple[float, float]]) -> None:
    compute, memory = sorted_work(found)
    blended = blend(compute, memory, Wishes.none(len(found)), 1.0)
    assert np.all(np.diff(blended.positions[~blended.right]) > 0)
    assert np.all(np.diff(blended.positions[blended.right]) < 0)


@given(works, st.data())
def test_urgent_requests_come_before_the_others_of_their_side(
    found: list[tuple[float, float]], data: st.DataObject
) -> None:
    compute, memory = sorted_work(found)
    urgent = np.array(data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found))))
    wishes = Wishes(np.where(urgent, 1.0, np.inf), np.zeros(len(found), np.int64), np.ones(1))
    blended = blend(compute, memory, wishes, 1000.0)
    assert sorted(blended.positions.tolist()) == list(range(len(found)))
    for side in (False, True):
        taken = urgent[blended.positions[blended.right == side]]
        assert not np.any(taken[1:] & ~taken[:-1])


def test_urgent_requests_run_in_about_the_time_they_need_and_keep_the_blend() -> None:
    """A tenth is urgent and compute-heavy: the others' memory work is blended in beside it."""
    compute = np.concatenate([np.full(1000, 4.0), np.full(1000, 1.0)])
    memory = np.concatenate([np.full(1000, 1.0), np.full(1000, 4.0)])
    wishes = Wishes(np.where(np.arange(2000) % 20 == 0, 10.0, np.inf), np.zeros(2000, np.int64), np.ones(1))
    wishes.deadline_s[1000:] = np.inf
    blended = blend(compute, memory, wishes, 5000.0)
    urgent_places = np.flatnonzero(np.isfinite(wishes.deadline_s[blended.positions]))
    assert urgent_places.max() < 2 * len(urgent_places) + 2
    so_far = blended.positions[: urgent_places.max() + 1]
    assert compute[so_far].sum() / memory[so_far].sum() == pytest.approx(1.0, abs=0.1)
    assert blended.ends.tolist() == [urgent_places.max() + 1, 2000]


def test_deadlines_that_are_met_anyway_change_nothing() -> None:
    tiers = urgency(np.array([10.0, 100.0, 130.0, np.inf]), 100.0)
    assert (tiers == NOT_URGENT).tolist() == [False, False, True, True]
    assert tiers[0] < tiers[1]


@given(st.integers(0, 100), st.integers(2, 5))
def test_no_tenant_falls_behind_its_share(seed: int, tenants: int) -> None:
    generator = np.random.default_rng(seed)
    compute, memory = sorted_work(list(zip(generator.random(300), generator.random(300) + 0.01, strict=True)))
    # The first tenant sends nearly everything.
    tenant = np.where(generator.random(300) < 0.8, 0, generator.integers(0, tenants, 300))
    weights = generator.random(tenants) + 0.5
    bound = 0.1
    blended = blend(compute, memory, Wishes(np.full(300, np.inf), tenant, weights), 1.0, bound)
    assert sorted(blended.positions.tolist()) == list(range(300))
    work = compute + compute.sum() / memory.sum() * memory
    waiting = np.bincount(tenant, minlength=tenants)
    lag = np.zeros(tenants)
    for position in blended.positions.tolist():
        active = waiting > 0
        lag[active] += work[position] * weights[active] / weights[active].sum()
        lag[tenant[position]] -= work[position]
        waiting[tenant[position]] -= 1
        # A tenth of its own share; while one is served others fall back by that one request, each.
        share = weights / weights.sum() * work.sum()
        assert np.all((lag <= bound * share + tenants * work.max())[waiting > 0])


def test_many_tenants_are_all_served_from_the_start() -> None:
    """A hundred tenants whose requests stand apart in the scan."""
    generator = np.random.default_rng(1)
    tenant = np.repeat(np.arange(100), 50)
    compute, memory = np.linspace(4, 1, 5000), np.linspace(1, 4, 5000) * generator.uniform(0.99, 1.01, 5000)
    blended = blend(compute, memory, Wishes(np.full(5000, np.inf), tenant, np.ones(100)), 1.0)
    first = [int(np.argmax(tenant[blended.positions] == each)) for each in range(100)]
    assert max(first) < 0.2 * 5000


def test_deadlines_come_before_fairness() -> None:
    tenant = np.repeat([0, 1], 500)
    generator = np.random.default_rng(2)
    compute, memory = sorted_work(list(zip(generator.random(1000) + 0.5, generator.random(1000) + 0.5, strict=True)))
    tenant = generator.permutation(tenant)
    wishes = Wishes(np.where(tenant == 0, 1.0, np.inf), tenant, np.ones(2))
    blended = blend(compute, memory, wishes, 1000.0)
    for side in (False, True):
        taken = tenant[blended.positions[blended.right == side]]
        assert np.all(np.diff(taken) >= 0)


def test_wishes_make_sense() -> None:
    with pytest.raises(ValueError, match="deadline"):
        Wishes(np.array([np.nan]), np.zeros(1, np.int64), np.ones(1))
    with pytest.raises(ValueError, match="weights"):
        Wishes(np.array([1.0]), np.zeros(1, np.int64), np.zeros(1))


@given(st.integers(0, 50), st.integers(1, 8))
def test_partitions_have_equal_work_and_the_density_of_the_window(seed: int, replicas: int) -> None:
    generator = np.random.default_rng(seed)
    requests = 10_000
    found = list(zip(generator.lognormal(0, 0.6, requests), generator.lognormal(0, 0.6, requests), strict=True))
    compute, memory = sorted_work(found)
    deadlines = np.where(generator.random(requests) < 0.1, 1.0, np.inf)
    blended = blend(compute, memory, Wishes(deadlines, np.zeros(requests, np.int64), np.ones(1)), 1e4)
    density = compute.sum() / memory.sum()
    work = compute + density * memory
    places, begins = partition(work[blended.positions], blended.ends, replicas)
    assert sorted(places.tolist()) == list(range(requests))
    parts = [blended.positions[places[a:b]] for a, b in pairwise(begins.tolist())]
    for resource in (compute, memory):
        amounts = [resource[part].sum() for part in parts]
        assert max(amounts) - min(amounts) < 0.02 * sum(amounts) / replicas
    # Every replica is through with its urgent requests after the same work.
    urgent_work = work[blended.positions[: blended.ends[0]]].sum() / replicas
    for part in parts:
        last = int(np.flatnonzero(np.isfinite(deadlines[part])).max())
        assert work[part[: last + 1]].sum() <= urgent_work + 2 * work.max()


def test_many_tiers_leave_partitions_equal() -> None:
    generator = np.random.default_rng(3)
    work = generator.random(120) + 0.5
    places, begins = partition(work, np.arange(1, 121), 4)
    amounts = [work[places[a:b]].sum() for a, b in pairwise(begins.tolist())]
    assert max(amounts) - min(amounts) <= 2 * work.max()


def test_partitions_need_a_replica() -> None:
    with pytest.raises(ValueError, match="replica"):
        partition(np.ones(3), np.array([3]), 0)


@given(st.integers(0, 5000), st.integers(1, 700))
def test_slices_cover_the_window_evenly(requests: int, slice_requests: int) -> None:
    slices = cut_slices(requests, slice_requests)
    assert len(slices) == -(-requests // slice_requests)
    assert sum(each.count for each in slices) == requests
    assert all(a.first + a.count == b.first for a, b in pairwise(slices))
    if slices:
        assert slices[0].first == 0
        sizes = [each.count for each in slices]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= slice_requests


def test_slices_need_a_size() -> None:
    with pytest.raises(ValueError, match="slice_requests"):
        cut_slices(1, 0)
