"""How a plan's slices are cut by the bytes of their lines."""

import numpy as np

from engine_ext.plan.partition import Slice
from service.jobs.gather import within


def test_slices_are_cut_where_their_lines_are_long() -> None:
    lengths = np.array([10, 10, 10, 90, 40, 30, 40, 500, 1])
    found = list(within([Slice(0, 3), Slice(3, 6)], lengths, 100))
    assert found == [Slice(0, 3), Slice(3, 1), Slice(4, 2), Slice(6, 1), Slice(7, 1), Slice(8, 1)]
    assert list(within([Slice(0, 9)], lengths, 10_000)) == [Slice(0, 9)]
