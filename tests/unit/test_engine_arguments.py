"""A name that SGLang does not know is said before anything loads."""

import importlib.util

import pytest

from service.estimates.engine_arguments import unknown_argument


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_a_misspelt_name_gets_the_one_that_was_meant() -> None:
    assert unknown_argument(["tp_size", "context_lenght"]) == (
        "SGLang has no argument 'context_lenght'; did you mean context_length?"
    )
    assert unknown_argument(["zzz"]) == "SGLang has no argument 'zzz'"
    assert unknown_argument(["enable_deterministic_inference", "mem_fraction_static"]) is None
