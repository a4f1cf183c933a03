"""A window's tree as it is drawn: in its frame, children below their parents, the scan ending where all is taken."""

import numpy as np
import pytest

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import Outputs, Shape, plan_window
from service.objects.plan_picture import MOST_BOXES, TEXT_TOKENS, Content, picture_of

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))


def prompts(topics: int, each: int) -> Prompts:
    return Prompts.of([[t] * 100 + [1000 + t * each + n] * 50 for t in range(topics) for n in range(each)])


def content(of: Prompts, owner: list[int] | None = None) -> Content:
    """Texts are the token ids themselves."""
    owners = np.zeros(len(of), dtype=np.int64) if owner is None else np.array(owner)
    return Content(of, ["proj_a", "proj_b"], owners, lambda ids: [" ".join(map(str, each)) for each in ids])


def test_a_window_of_two_topics() -> None:
    outputs = Outputs.of_known(np.array([1] * 10 + [4000] * 10))  # the first heavy in compute, the second in memory
    drawn, _ = picture_of(plan_window(prompts(2, 10), outputs, COST, shape=Shape(1, 5)), content(prompts(2, 10)))
    assert (drawn.requests, drawn.depth) == (20, 150)
    topics = [box for box in drawn.boxes if box.begin == 0]
    assert sorted((box.left, box.width, box.end) for box in topics) == [(0.0, 0.5, 100), (0.5, 0.5, 100)]
    assert min(topics, key=lambda box: box.left).density > 0 > max(topics, key=lambda box: box.left).density
    assert len([box for box in drawn.boxes if box.begin == 100]) == 20
    assert all(box.left >= 0 and box.left + box.width <= 1.0001 for box in drawn.boxes)
    assert len(drawn.reach) == 4
    assert sum(drawn.reach[-1]) == pytest.approx(1)
    assert drawn.reach[0][0] > 0
    assert drawn.reach[0][1] > 0


def test_a_large_window_is_drawn_by_its_widest_nodes() -> None:
    plan = plan_window(prompts(40, 100), Outputs.of_known(np.full(4000, 20)), COST)
    drawn, _ = picture_of(plan, content(prompts(40, 100)))
    assert len(drawn.boxes) <= MOST_BOXES
    assert len([box for box in drawn.boxes if box.begin == 0]) == 40


def test_boxes_say_what_is_shared_and_whose_requests_are_in_them() -> None:
    outputs = Outputs.of_known(np.array([1] * 10 + [4000] * 10))
    owner = [0] * 10 + [0, 1] * 5
    drawn, texts = picture_of(plan_window(prompts(2, 10), outputs, COST), content(prompts(2, 10), owner))
    first, second = sorted((box for box in drawn.boxes if box.begin == 0), key=lambda box: box.left)
    assert texts[drawn.boxes.index(first)] == " ".join(["0"] * TEXT_TOKENS)
    assert (first.owners, second.owners) == (((0, 10),), ((0, 5), (1, 5)))
    assert (first.output_tokens, second.output_tokens) == (1, 4000)
    [leaf] = [box for box, text in zip(drawn.boxes, texts, strict=True) if text.startswith("1013 ")]
    assert (leaf.begin, leaf.owners) == (100, ((1, 1),))
