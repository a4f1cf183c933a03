"""A name that SGLang does not know is said before anything loads."""

import importlib.util

import pytest

from service.estimates.engine_arguments import argument_fault


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_a_misspelt_name_gets_the_one_that_was_meant() -> None:
    assert argument_fault({"tp_size": 1, "context_lenght": 8}) == (
        "SGLang has no argument 'context_lenght'; did you mean context_length?"
    )
    assert argument_fault({"zzz": 1}) == "SGLang has no argument 'zzz'"
    assert argument_fault({"enable_deterministic_inference": True, "mem_fraction_static": 0.5}) is None


@pytest.mark.parametrize("size", ["x", 0, 1.5, True, None])
def test_a_number_of_gpus_must_be_one(size: object) -> None:
    assert (argument_fault({"tp_size": size}) or "").startswith("tp_size must be a whole number, 1 or more")
