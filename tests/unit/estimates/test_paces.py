"""How fast models are answered, by looks every few seconds."""

import pytest

from service.db.tables import Batch
from service.estimates.paces import Paces


def batch(name: str, model: str) -> Batch:
    """100 requests of which the plan expects two seconds each."""
    return Batch(
        id=name,
        model=model,
        total=100,
        planned=100,
        planned_compute_s=200.0,
        planned_memory_s=50.0,
        planned_output_tokens=0.0,
    )


def test_a_model_that_rests_keeps_its_pace_and_adds_nothing_to_others() -> None:
    paces, one, other = Paces(), batch("a", "one"), batch("b", "other")
    paces.look([one, other], {"a": 0, "b": 0}, {"one", "other"}, 0)
    paces.look([one, other], {"a": 50, "b": 10}, {"one", "other"}, 10)
    assert paces.answers_per_second == 6.0
    paces.look([other], {"b": 20}, {"one", "other"}, 20)
    assert paces.answers_per_second == pytest.approx(1.0)
    assert paces.by_model["one"].work == pytest.approx(10.0)
    assert paces.by_model["other"].work == pytest.approx(2.0)


def test_time_without_a_worker_counts_for_nothing() -> None:
    paces, one = Paces(), batch("a", "one")
    paces.look([one], {"a": 0}, {"one"}, 0)
    paces.look([one], {"a": 50}, {"one"}, 10)
    paces.look([one], {"a": 50}, set(), 1000)
    assert (paces.answers_per_second, paces.by_model["one"].work) == (0.0, pytest.approx(10.0))
    paces.look([one], {"a": 100}, {"one"}, 1010)
    assert paces.answers_per_second == pytest.approx(5.0)
