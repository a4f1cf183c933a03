"""A whole plan: what it says of a window, and what it refuses."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.blend import Wishes
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import Outputs, Shape, plan_window

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
requests = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 5000)), max_size=14)


@given(requests, st.integers(1, 4), st.integers(1, 5))
def test_every_request_is_in_one_slice_of_one_partition(
    found: list[tuple[list[int], int]], replicas: int, slice_requests: int
) -> None:
    outputs = Outputs.of_known(np.array([output for _, output in found], dtype=np.int64))
    prompts = Prompts.of([prompt for prompt, _ in found])
    plan = plan_window(prompts, outputs, COST, shape=Shape(replicas, slice_requests))
    assert sorted(plan.order.tolist()) == list(range(len(found)))
    assert len(plan.partitions) == replicas + 1
    covered = [place for each in plan.slices for place in range(each.first, each.first + each.count)]
    assert covered == list(range(len(found)))
    edges = {each.first for each in plan.slices} | {len(found)}
    assert set(plan.partitions.tolist()) <= edges


def test_load_is_that_of_the_formulas() -> None:
    prompts = Prompts.of([[1] * 300 + [n] * 100 for n in range(2, 12)])
    plan = plan_window(prompts, Outputs.of_known(np.full(10, 50)), COST)
    assert plan.sharing == pytest.approx(9 * 300 / 4000)
    assert plan.load.compute_s == pytest.approx(10 * float(COST.compute_s(400, 50)))
    assert plan.load.sharing == pytest.approx(9 * float(COST.saved_s(300)) / plan.load.compute_s)
    assert plan.load.density == pytest.approx(plan.load.net_compute_s / (10 * float(COST.memory_s(400, 50))))
    assert plan.compute_s.sum() == pytest.approx(plan.load.net_compute_s)


def test_identical_prompts_are_computed_once() -> None:
    plan = plan_window(Prompts.of([[1, 2, 3, 4]] * 4), Outputs.of_known(np.full(4, 1)), COST)
    assert plan.sharing == pytest.approx(0.75)
    assert plan.prompt_tokens == 16


def test_slices_have_about_the_density_of_the_window() -> None:
    generator = np.random.default_rng(3)
    sizes = generator.integers(50, 3000, 4000)
    prompts = Prompts.of_segments([[(str(n), int(size))] for n, size in enumerate(sizes)])
    outputs = generator.lognormal(5, 1, 4000).astype(np.int64) + 1
    plan = plan_window(prompts, Outputs.of_known(outputs), COST, shape=Shape(slice_requests=250))
    for each in plan.slices:
        chosen = plan.order[each.first : each.first + each.count]
        assert plan.compute_s[chosen].sum() / plan.memory_s[chosen].sum() == pytest.approx(plan.load.density, rel=0.1)
    densities = [plan.density[plan.order[a:b]] for a, b in pairwise([0, 1000, 4000])]
    assert densities[0].max() > densities[1].max()


def test_a_sample_stands_for_the_rest() -> None:
    """Two prefixes, short and long answers; of each a few are known."""
    prompts = Prompts.of([[k] * 100 + [10 + n] for n in range(400) for k in (1, 2)])
    truth = np.tile([5, 3000], 400)
    sampled = np.arange(20)
    outputs = Outputs(np.full(800, 10_000), np.full(800, -1), None, sampled, truth[:20])
    plan = plan_window(prompts, outputs, COST)
    assert plan.estimates.mean[100::2].max() < 20  # ten answers do not rule out a long one
    assert plan.estimates.mean[101::2] == pytest.approx(3000, rel=0.2)
    assert not plan.right[np.isin(plan.order, np.arange(0, 800, 2))].all()
    assert plan.order[0] % 2 == 0


def test_a_window_that_only_reads_prompts_is_planned() -> None:
    plan = plan_window(Prompts.of([[1, 2], [3]]), Outputs.of_known(np.zeros(2, np.int64)), COST)
    assert plan.load.density == np.inf
    assert sorted(plan.order.tolist()) == [0, 1]


def test_an_empty_window_is_an_empty_plan() -> None:
    plan = plan_window(Prompts.of([]), Outputs.of_known(np.zeros(0, np.int64)), COST, Wishes.none(0))
    assert (len(plan.order), plan.slices, plan.load.compute_s) == (0, (), 0.0)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (lambda: Shape(replicas=0), "replica"),
        (lambda: Shape(slice_requests=0), "slice_requests"),
        (lambda: Shape(keep_sharing=2.0), "sharing"),
    ],
)
def test_a_plan_needs_sane_numbers(shape: Callable[[], Shape], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan_window(Prompts.of([[1]]), Outputs.of_known(np.ones(1, np.int64)), COST, shape=shape())
