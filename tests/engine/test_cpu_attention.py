"""Attention on a CPU computes new tokens alone, with the bits of SGLang's own in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from engine_ext.plugin.cpu import attention

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 32, 4096
sglangs: Any = TorchNativeAttnBackend._run_sdpa_forward_extend  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("prefixes", "news"),
    [([0], [1]), ([0], [1300]), ([900, 0, 7], [1, 40, 600]), ([64] * 20, [1] * 20), ([511, 512], [513, 512])],
)
def test_new_tokens_have_the_bits_of_a_whole_computation(prefixes: list[int], news: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(news))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    keys, values = noise(SLOTS, KV_HEADS, SIZE), noise(SLOTS, KV_HEADS, SIZE)
    query = noise(sum(news), HEADS, SIZE)
    slots = torch.stack([torch.randperm(SLOTS, generator=generator)[:2048] for _ in news])
    lengths = [torch.arange(len(news)), torch.tensor(prefixes) + torch.tensor(news)]
    more: list[Any] = [*lengths, torch.tensor(prefixes), torch.tensor(news)]
    options: dict[str, Any] = {"scaling": SIZE**-0.5, "enable_gqa": True, "causal": True}
    backend = SimpleNamespace()
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    attention.extend(sglangs, backend, query, ours, keys, values, slots, *more, **options)
    sglangs(backend, query.double(), theirs, keys, values, slots, *more, **options)
    assert torch.equal(ours, theirs)
