"""The names of server arguments, which are read without importing SGLang, are SGLang's."""

import dataclasses

import pytest

from service.estimates import engine_arguments

pytest.importorskip("sglang")


def test_the_names_are_those_of_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    assert {field.name for field in dataclasses.fields(ServerArgs)} == engine_arguments.known_arguments()
