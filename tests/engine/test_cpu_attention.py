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

sglangs_decode: Any = TorchNativeAttnBackend._run_sdpa_forward_decode  # pyright: ignore[reportPrivateUsage]


def places(prefixes: list[int], news: list[int], generator: torch.Generator, shared: int = 0) -> list[Any]:
    """Where the requests' tokens are, of which so many are shared, and their lengths, as SGLang passes them."""
    slots = torch.stack([torch.randperm(SLOTS, generator=generator)[:2048] for _ in news])
    slots[:, :shared] = slots[0, :shared].clone()
    lengths = [torch.tensor(prefixes) + torch.tensor(news), torch.tensor(prefixes), torch.tensor(news)]
    return [slots, torch.arange(len(news)), *lengths]


@pytest.mark.parametrize("shared", [0, 300, 2048])
@pytest.mark.parametrize(
    ("prefixes", "news"),
    [
        ([0], [1]),
        ([0], [1300]),
        ([900, 0, 7], [1, 40, 600]),
        ([64] * 20, [1] * 20),
        ([511, 512], [513, 512]),
        ([400, 310, 1000, 300, 20, 500], [3, 1, 1, 40, 2, 100]),
        ([1900] * 40, [1] * 20 + [30] * 20),
    ],
)
def test_new_tokens_have_the_bits_of_a_whole_computation(prefixes: list[int], news: list[int], shared: int) -> None:
    generator = torch.Generator().manual_seed(len(news))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    keys, values = noise(SLOTS, KV_HEADS, SIZE), noise(SLOTS, KV_HEADS, SIZE)
    query = noise(sum(news), HEADS, SIZE)
    more, backend = places(prefixes, news, generator, shared), SimpleNamespace()
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    attention.extend(sglangs, backend, query, ours, keys, values, *more, **OPTIONS)
    sglangs(backend, query.double(), theirs, keys, values, *more, **OPTIONS)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shared", [0, 300, 900])
@pytest.mark.parametrize("lengths", [[1], [900, 1, 7, 400], [910 + k for k in range(50)], [300] * 30])
def test_decodes_have_the_bits_of_a_whole_computation(lengths: list[int], shared: int) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    keys, values = (torch.randn(SLOTS, KV_HEADS, SIZE, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(len(lengths), HEADS, SIZE, generator=generator).bfloat16()
    table, pools, seq_lens, *_ = places([each - 1 for each in lengths], [1] * len(lengths), generator, shared)
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    where = keys, values, table, pools, seq_lens
    options = OPTIONS | {"causal": False}
    attention.decode(sglangs_decode, SimpleNamespace(), query, ours, *where, **options)
    sglangs_decode(SimpleNamespace(), query.double(), theirs, *where, **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("is_decode", [False, True])
def test_a_shared_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch, is_decode: bool) -> None:
    """60 answers to one prompt of 4,000 tokens took seconds for each step."""
    read = 0

    def counted(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal read
        read += key.shape[-2]
        return scaled_dot_product_attention(query, key, *args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    query = torch.zeros(60, HEADS, SIZE, dtype=torch.bfloat16)
    cache = torch.zeros(SLOTS, KV_HEADS, SIZE, dtype=torch.bfloat16)
    more = places([2000] * 60, [1] * 60, torch.Generator().manual_seed(1), 1990)
    more[0][1::2, :1990] = more[0][0, :1990].flip(0)  # every second one has another prefix
    run: Any = attention.decode if is_decode else attention.extend
    more = more[:3] if is_decode else more
    run(sglangs, SimpleNamespace(), query, torch.empty_like(query), cache, cache, *more, **OPTIONS)
    assert read == 2 * 1990 + 60 * 11


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
