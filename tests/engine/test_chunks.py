"""The chunk on a CPU follows what its steps take."""

import pytest

from engine_ext.plugin.cpu.chunks import AFTER, next_chunk


@pytest.mark.parametrize(
    ("chunk", "tokens", "took_s", "short", "wanted"),
    [
        (4096, 4096, 12.0, 0, 256),  # 341 tokens would take a second
        (4096, 300, 2.0, 0, 2048),  # few tokens: the machine may have stood still
        (256, 256, 1.1, 0, 128),
        (256, 256, 0.9, 0, 256),
        (256, 256, 0.2, 1, 256),
        (256, 256, 0.2, AFTER, 512),
        (64, 64, 9.0, 0, 64),
    ],
)
def test_the_chunk_follows_the_steps(chunk: int, tokens: int, took_s: float, short: int, wanted: int) -> None:
    assert next_chunk(chunk, tokens, took_s, 1.0, short) == wanted
