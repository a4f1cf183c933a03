"""Attention on a CPU computes new tokens alone, with the bits of SGLang's own in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from engine_ext.plugin.cpu import attention

OPTIONS: dict[str, Any] = {"scaling": 32**-0.5, "enable_gqa": True, "causal": True}
HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 32, 4096
sglangs: Any = TorchNativeAttnBackend._run_sdpa_forward_extend  # pyright: ignore[reportPrivateUsage]


def places(prefixes: list[int], news: list[int], generator: torch.Generator) -> list[Any]:
    """Where the requests' tokens are, and their lengths, as SGLang passes them."""
    slots = torch.stack([torch.randperm(SLOTS, generator=generator)[:2048] for _ in news])
    lengths = [torch.tensor(prefixes) + torch.tensor(news), torch.tensor(prefixes), torch.tensor(news)]
    return [slots, torch.arange(len(news)), *lengths]


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
    more, backend = places(prefixes, news, generator), SimpleNamespace()
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    attention.extend(sglangs, backend, query, ours, keys, values, *more, **OPTIONS)
    sglangs(backend, query.double(), theirs, keys, values, *more, **OPTIONS)
    assert torch.equal(ours, theirs)


def test_cached_tokens_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 answers to one long prompt once held everybody for 40 s."""
    rows = 0

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal rows
        rows += query.shape[-2]
        return scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    prefixes, news = [2000] * 128, [1] * 127 + [48]
    query = torch.zeros(sum(news), HEADS, SIZE, dtype=torch.bfloat16)
    cache = torch.zeros(SLOTS, KV_HEADS, SIZE, dtype=torch.bfloat16)
    more = places(prefixes, news, torch.Generator().manual_seed(1))
    attention.extend(sglangs, SimpleNamespace(), query, torch.empty_like(query), cache, cache, *more, **OPTIONS)
    assert rows == sum(news)
