"""The prompts of a window as arrays."""

import numpy as np

from engine_ext.plan.prompts import Prompts


def test_prompts_kept_apart_share_prefixes_in_their_space_alone() -> None:
    prompts = Prompts.of([[1, 2, 3], [1, 2, 4], [], [1, 2, 3]])
    apart = prompts.kept_apart(["a", "b"], np.array([0, 0, 1, 1]))
    assert [list(apart[k][1:]) for k in (0, 1, 3)] == [[2, 3], [2, 4], [2, 3]]
    assert apart[0][0] == apart[1][0] != apart[3][0]
    assert apart[0][0] != prompts[0][0] == 1
    assert list(apart.starts) == list(prompts.starts)
