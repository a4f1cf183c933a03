"""A name that SGLang does not know is said before anything loads."""

import dataclasses

import pytest

from service.estimates import engine_arguments
from service.estimates.engine_arguments import unknown_argument

pytest.importorskip("sglang")


def test_a_misspelt_name_gets_the_one_that_was_meant() -> None:
    assert unknown_argument(["tp_size", "context_lenght"]) == (
        "SGLang has no argument 'context_lenght'; did you mean context_length?"
    )
    assert unknown_argument(["zzz"]) == "SGLang has no argument 'zzz'"
    assert unknown_argument(["enable_deterministic_inference", "mem_fraction_static"]) is None


@pytest.mark.slow
def test_the_names_are_those_of_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    assert {field.name for field in dataclasses.fields(ServerArgs)} == engine_arguments._known()
