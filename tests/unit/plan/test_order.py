"""Sort, split, merge: what the loop promises, and its split against brute force."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.order import order_scan, sort_layers
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.resources import Requests, marginal_density, node_loads, request_loads
from engine_ext.plan.split import cut_tree
from engine_ext.plan.tree import PrefixTree, build_tree

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.sampled_from([1, 2, 30, 400, 9000])), min_size=1, max_size=10
)
keeps = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def planned(found: list[tuple[list[int], int]], stretch: int = 100) -> tuple[PrefixTree, Requests]:
    """Each letter stands for `stretch` tokens, so that prefixes are worth something."""
    prompts = [[letter for letter in prompt for _ in range(stretch)] for prompt, _ in found]
    return build_tree(Prompts.of(prompts)), Requests.exact([len(each) for each in prompts], [d for _, d in found])


@given(requests, keeps)
def test_scan_is_a_permutation_that_keeps_its_sharing(found: list[tuple[list[int], int]], keep: float) -> None:
    tree, lengths = planned(found)
    scan = order_scan(tree, lengths, COST, keep)
    assert sorted(scan.tree.order.tolist()) == list(range(len(found)))
    assert keep - 1e-9 <= scan.sharing_kept <= 1 + 1e-9
    assert scan.sorts <= len(found) + 1


@given(requests, keeps)
def test_sharing_kept_is_what_neighbours_in_the_scan_share(found: list[tuple[list[int], int]], keep: float) -> None:
    tree, lengths = planned(found)
    scan = order_scan(tree, lengths, COST, keep)
    prompts = [[letter for letter in found[i][0] for _ in range(100)] for i in scan.tree.order.tolist()]
    saved = 0.0
    for a, b in pairwise(prompts):
        common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        saved += float(COST.saved_s(common))
    assert saved == pytest.approx(float(scan.loads.saved_s[0]))


@given(requests)
def test_layers_fall_in_density(found: list[tuple[list[int], int]]) -> None:
    tree, lengths = planned(found)
    ordered = sort_layers(tree, node_loads(tree, lengths, COST), COST)
    density = marginal_density(ordered, node_loads(ordered, lengths, COST), COST)
    last: dict[int, float] = {}
    for node in range(1, len(ordered)):
        parent = int(ordered.parent[node])
        assert density[node] <= last.get(parent, np.inf) * (1 + 1e-9)
        last[parent] = float(density[node])
    assert ordered.distinct_tokens == tree.distinct_tokens


@given(requests)
def test_without_anything_to_share_the_scan_falls_in_density(found: list[tuple[list[int], int]]) -> None:
    alone = [([100 + n, *prompt], output) for n, (prompt, output) in enumerate(found)]
    tree, lengths = planned(alone)
    scan = order_scan(tree, lengths, COST)
    compute, memory = request_loads(scan.tree, lengths, COST)
    assert np.all(np.diff(compute / memory) <= 1e-9)


@given(requests, st.floats(0, 1))
def test_no_affordable_cut_of_two_levels_moves_more(found: list[tuple[list[int], int]], share: float) -> None:
    """All ways to send leaves right, against the cut's; its price search may miss the best by what one node costs."""
    found = found[:7]
    tree, lengths = planned(found)
    compute, memory = request_loads(tree, lengths, COST)
    excess = compute - float(compute.sum() / memory.sum()) * memory
    segment = np.asarray(COST.saved_s(tree.end - tree.begin, tree.begin))
    budget = share * float(segment.sum())
    cut = cut_tree(tree, segment, excess, budget, worth=1e-6)
    gains: list[float] = []
    ours = -np.inf
    priced: list[tuple[float, float]] = []
    for sides in product((False, True), repeat=len(found)):
        right = np.array(sides)
        both = [right[a:b].any() and not right[a:b].all() for a, b in zip(tree.first, tree.last, strict=True)]
        both[0] = False
        cost = float(segment[np.array(both)].sum())
        gain = float(excess[~right].clip(0).sum() - excess[right].clip(max=0).sum())
        if right.tolist() == cut.right.tolist():
            assert cut.cost_s == pytest.approx(cost)
            assert cost <= budget * (1 + 1e-9)
            ours = gain
        priced.append((gain, cost))
        if cost <= budget:
            gains.append(gain)
    if budget >= float(segment.sum()):  # everything may be cut
        assert ours == pytest.approx(max(gains))
    # It lies on the hull of gain over cost: nothing that costs no more gains more.
    assert ours >= max(gain for gain, cost in priced if cost <= cut.cost_s * (1 + 1e-9)) * (1 - 1e-9)


def test_an_outlier_leaves_its_prefix_for_the_other_end() -> None:
    """Figure 5: request 2 shares a prefix with 1 and 3, and is memory-heavy."""
    shared = [1] * 2000
    prompts = [[*shared, *[10 + n] * 500] for n in range(40)] + [[100 + n] * 300 for n in range(40)]
    outputs = [4] * 39 + [8000] + [6000] * 40
    tree = build_tree(Prompts.of(prompts))
    lengths = Requests.exact([len(each) for each in prompts], outputs)
    kept = order_scan(tree, lengths, COST, keep=1.0)
    split = order_scan(tree, lengths, COST, keep=0.9)
    assert kept.sharing_kept == pytest.approx(1.0)
    assert split.tree.order.tolist().index(39) > 39 == kept.tree.order.tolist().index(39)
    assert 0.9 <= split.sharing_kept < 1


def test_a_tight_budget_still_buys_the_best_splits() -> None:
    """Ten prefixes with an outlier each; one prefix is short and its outlier the heaviest."""
    prompts: list[list[int]] = []
    outputs: list[int] = []
    for group in range(10):
        shared = [group] * (200 if group == 0 else 2000)
        prompts += [[*shared, *[100 + 10 * group + n] * 300] for n in range(8)]
        outputs += [4] * 7 + [9000 if group == 0 else 5000]
    prompts += [[500 + n] * 300 for n in range(40)]
    tree = build_tree(Prompts.of(prompts))
    lengths = Requests.exact([len(each) for each in prompts], [*outputs, *[6000] * 40])
    split = order_scan(tree, lengths, COST, keep=0.995)
    assert 0.995 <= split.sharing_kept < 1
    place = split.tree.order.tolist().index
    assert place(7) > max(place(n) for n in range(7)) + 1


def test_siblings_are_sorted_by_what_is_not_paid_above_them() -> None:
    """With its long prefix counted A would be denser than B; without, B is."""
    shared = [1] * 999
    prompts = [[*shared, 2], [*shared, *[3] * 1001]]
    tree = build_tree(Prompts.of(prompts))
    lengths = Requests.exact([1000, 2000], [10, 40])
    alone = [float(COST.density(p, d)) for p, d in ((1000, 10), (2000, 40))]
    ordered = sort_layers(tree, node_loads(tree, lengths, COST), COST)
    assert alone[0] > alone[1]
    assert ordered.order.tolist() == [1, 0]


def test_parts_that_end_up_side_by_side_are_joined() -> None:
    """A system prompt before everything is cut in two, and its halves meet in the middle: nothing is lost."""
    prompts = [[1] * 500 + [10 + n] * 50 for n in range(20)]
    lengths = Requests.exact([len(each) for each in prompts], [2, 5000] * 10)
    scan = order_scan(build_tree(Prompts.of(prompts)), lengths, COST, keep=0.5)
    assert scan.sharing_kept == pytest.approx(1.0)


def test_a_window_without_memory_work_is_not_split() -> None:
    tree, lengths = planned([([0, 1], 0), ([0, 2], 0), ([1], 0)])
    scan = order_scan(tree, lengths, COST, keep=0.0)
    assert scan.sharing_kept == pytest.approx(1.0)


@pytest.mark.parametrize("keep", [-0.1, 1.1])
def test_keep_is_a_share(keep: float) -> None:
    tree, lengths = planned([([0], 1)])
    with pytest.raises(ValueError, match="from 0 to 1"):
        order_scan(tree, lengths, COST, keep)
