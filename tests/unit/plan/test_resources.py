"""Loads of nodes against sums over the requests below them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.resources import Requests, node_loads, request_loads
from engine_ext.plan.tree import build_tree

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
requests = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=7), st.integers(0, 500)), min_size=1, max_size=12)


@given(requests)
def test_load_of_a_node_is_the_sum_of_its_requests(found: list[tuple[list[int], int]]) -> None:
    prompts = [prompt for prompt, _ in found]
    tree = build_tree(Prompts.of(prompts))
    p = np.array([len(prompt) for prompt in prompts], dtype=np.float64)
    d = np.array([output for _, output in found], dtype=np.float64)
    loads = node_loads(tree, Requests.exact(p, d), COST)
    for node in range(len(tree)):
        below = tree.order[tree.first[node] : tree.last[node]]
        load = loads.of(node)
        assert load.compute_s == pytest.approx(float(COST.compute_s(p[below], d[below]).sum()))
        assert load.memory_s == pytest.approx(float(COST.memory_s(p[below], d[below]).sum()))
        # What is left to compute: the outputs, and each distinct prompt token from this node's segment on, once.
        distinct = {tuple(prompts[i][:n]) for i in below for n in range(1, len(prompts[i]) + 1)}
        once = sum(float(COST.saved_s(1, len(prefix) - 1)) for prefix in distinct)
        above = [tuple(prompts[i][:n]) for i in below for n in range(1, int(tree.begin[node]) + 1)]
        shared_above = sum(float(COST.saved_s(1, len(prefix) - 1)) for prefix in above)
        first_above = sum(float(COST.saved_s(1, len(prefix) - 1)) for prefix in set(above))
        outputs = float(COST.compute_s(0, d[below]).sum())
        assert load.net_compute_s == pytest.approx(outputs + once + shared_above - first_above)


@given(requests)
def test_equal_parts_of_shared_work_add_up_to_the_root(found: list[tuple[list[int], int]]) -> None:
    tree = build_tree(Prompts.of([prompt for prompt, _ in found]))
    lengths = Requests.exact([len(prompt) for prompt, _ in found], [output for _, output in found])
    compute, memory = request_loads(tree, lengths, COST)
    root = node_loads(tree, lengths, COST).of(0)
    assert compute.sum() == pytest.approx(root.net_compute_s)
    assert memory.sum() == pytest.approx(root.memory_s)


@given(requests)
def test_nodes_below_a_node_are_behind_it(found: list[tuple[list[int], int]]) -> None:
    tree = build_tree(Prompts.of([prompt for prompt, _ in found]))
    for node in range(len(tree)):
        below = {node}
        for other in range(node + 1, len(tree)):
            if tree.parent[other] in below:
                below.add(other)
        assert sorted(below) == list(range(node, int(tree.after[node])))


def test_root_has_the_density_and_sharing_of_the_window() -> None:
    prefix = list(range(1000))
    prompts = [[*prefix, 5000 + n] for n in range(10)]
    tree = build_tree(Prompts.of(prompts))
    p, d = np.full(10, 1001.0), np.full(10, 64.0)
    root = node_loads(tree, Requests.exact(p, d), COST).of(0)
    assert root.saved_s == pytest.approx(9 * float(COST.saved_s(1000)))
    assert root.density == pytest.approx((10 * float(COST.compute_s(1001, 64)) - root.saved_s) / root.memory_s)


def test_request_without_output_is_infinitely_dense() -> None:
    tree = build_tree(Prompts.of([[1, 2], [3]]))
    loads = node_loads(tree, Requests.exact([2.0, 1.0], [0.0, 4.0]), COST)
    leaf = int(np.flatnonzero((tree.first == 0) & (tree.begin == 0) & (tree.end == 2))[0])
    assert loads.density[leaf] == np.inf
    assert np.isfinite(loads.density[0])
