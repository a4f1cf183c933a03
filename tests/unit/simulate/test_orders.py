"""The orders of other systems: what each puts first, and that none leaves a request out."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.simulate.orders import decode_heavy_first, sorted_f


def work(*requests: tuple[int, float]) -> Any:
    lengths, mean = (np.array(each) for each in zip(*requests, strict=True))
    return SimpleNamespace(lengths=lengths, estimates=SimpleNamespace(mean=mean.astype(np.float64)))


def test_the_most_output_for_its_prompt_comes_first() -> None:
    assert decode_heavy_first(work((100, 10), (10, 10), (1000, 500)), 0).tolist() == [1, 2, 0]


def test_batches_fit_and_short_answers_come_first_in_them() -> None:
    # By output one long prompt fills the cache; by all tokens three requests fit, which is a better batch.
    requests = work((90, 4), (95, 4), (10, 5), (10, 4), (10, 3))
    assert sorted_f(requests, 0, capacity=100).tolist() == [4, 3, 2, 0, 1]


def test_every_request_comes_once_even_one_that_no_cache_holds() -> None:
    generator = np.random.default_rng(1)
    requests = work(*zip(generator.integers(1, 50, 300).tolist(), generator.integers(1, 90, 300).tolist(), strict=True))
    assert sorted(sorted_f(requests, 0, capacity=60).tolist()) == list(range(300))
