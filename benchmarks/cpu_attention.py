"""Measures what a decode's attention takes on this CPU, ours beside SGLang's, where requests share a prompt or do not.

    python -m benchmarks.cpu_attention

One layer of the demo's model (9 heads, 3 of the KV cache, of 64), keys in bfloat16, attention in float32. The two take
turns, and the best of each counts; they must agree.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from engine_ext.plugin.cpu import attention

HEADS, KV_HEADS, SIZE, ROUNDS = 9, 3, 64, 5
CASES = ((60, 4000, 60), (60, 800, 30), (60, 0, 300), (1, 0, 4000))  # requests, tokens that they share, and of each
OPTIONS: dict[str, Any] = {"scaling": SIZE**-0.5, "enable_gqa": True, "causal": False, "is_cross_attn": False}
sglangs: Any = TorchNativeAttnBackend._run_sdpa_forward_decode  # pyright: ignore[reportPrivateUsage]


def took_s(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(requests: int, shared: int, own: int) -> tuple[float, float]:
    """Return the seconds of one layer: ours, and SGLang's. Raises AssertionError where they differ."""
    cache = torch.randn(shared + requests * own, KV_HEADS, SIZE).bfloat16()
    slots = [[*range(shared), *range(shared + own * n, shared + own * (n + 1))] for n in range(requests)]
    lengths = torch.full((requests,), shared + own)
    where = (cache, cache, torch.tensor(slots, dtype=torch.int32), torch.arange(requests), lengths)
    query = torch.randn(requests, HEADS, SIZE).bfloat16()
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    backend, wide = SimpleNamespace(), query.float()
    rounds = [
        (
            took_s(lambda: attention.decode(sglangs, backend, query, ours, *where, **OPTIONS)),
            took_s(lambda: sglangs(backend, wide, theirs, *where, **OPTIONS)),
        )
        for _ in range(ROUNDS)
    ]
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
    return min(each[0] for each in rounds), min(each[1] for each in rounds)


def main() -> None:
    attention.handed_over = lambda: SimpleNamespace(cpu_threads=torch.get_num_threads())  # type: ignore[assignment]
    for requests, shared, own in CASES:
        ours, theirs = measure(requests, shared, own)
        print(
            f"{requests} requests, {shared} shared tokens and {own} of each: ours {1e3 * ours:.1f} ms, SGLang's "
            f"{1e3 * theirs:.1f} ms, {theirs / ours:.1f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
