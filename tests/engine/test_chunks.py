"""The chunk on a CPU follows what its steps take."""

import pytest

from engine_ext.plugin.cpu.chunks import next_chunk


@pytest.mark.parametrize(
    ("chunk", "tokens", "took_s", "wanted"),
    [
        (4096, 4096, 12.0, 256),  # 341 tokens would take a second
        (4096, 300, 2.0, 128),  # a short prompt behind a long one says as much
        (256, 256, 1.1, 128),
        (256, 256, 0.9, 256),
        (256, 256, 0.2, 512),
        (256, 100, 0.2, 256),  # not full: it says nothing of a full one
        (64, 64, 9.0, 64),
    ],
)
def test_the_chunk_follows_the_steps(chunk: int, tokens: int, took_s: float, wanted: int) -> None:
    assert next_chunk(chunk, tokens, took_s, 1.0) == wanted
