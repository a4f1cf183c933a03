"""The stages without an engine: what the machine is, whether FA3 computes the right thing, and what overlap gains.

Each imports what it needs, because a library that does not load must fail one stage and not the others.
"""

import importlib
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu.records import OVERLAP, Folder

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of Llama-3-8B
HIDDEN, INTERMEDIATE = 4096, 14336
MOST_OFF = 1e-2  # of 1 and the expected value together: an output of attention is bf16
MARGINS = (0, 33, 66, 92, 108)  # SMs that attention leaves to the GEMM beside it
MOST_MARGIN = 66  # of those, for nano-batches: a half with prompts has it too, and must not starve
ATTENTIONS = 6  # for one GEMM, which takes about as long
WARM_S = 0.1
SPLITS = (0.25, 0.5, 0.75)  # of the SMs, for attention alone
PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "tokenizers", "sglang", "sglang-kernel", "xgrammar")
LIBRARIES = ("numba", "greenlet", "cuda.bindings", "sgl_kernel", "sglang.srt.managers.scheduler", "flashinfer")


class NoGpu(Exception):
    """There is no CUDA here."""


def machine(_: Folder) -> dict[str, Any]:
    """Say what is here, and how fast it multiplies and copies."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "missing": {}}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a library raises as it loads
            found["missing"][name] = f"{type(error).__name__}: {error}"[:200]
    if not torch.cuda.is_available():
        return found | {"gpu": None}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    found["nvidia_smi"] = said.splitlines()[-1:]
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    seconds, copy_s = _seconds(lambda: a @ b), _seconds(lambda: target.copy_(source))
    return found | {
        "gpu": torch.cuda.get_device_name(0),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "tflops": round(2 * size**3 / seconds / 1e12, 1),
        "copy_tb_s": round(2 * source.nbytes / copy_s / 1e12, 3),
    }


def kernels(_: Folder) -> dict[str, Any]:
    """Compare FA3 with attention in float64: decodes, a prompt's chunk, and both in one call."""
    import torch

    _needs_cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    found: dict[str, Any] = {}
    shapes = {"decode": ([1] * 8, [300, 17, 1, 1024, 640, 33, 2000, 128]), "extend": ([256], [1500])}
    shapes["mixed"] = ([1, 1, 300, 1], [700, 31, 900, 5])
    for name, (queries, contexts) in shapes.items():
        off = _attention_off(torch, generator, queries, contexts, sm_margin=0)
        found[name] = round(off, 5)
        found[f"{name}_with_margin"] = round(_attention_off(torch, generator, queries, contexts, MOST_MARGIN), 5)
    if max(found.values()) > MOST_OFF:
        raise AssertionError(f"FA3 is off: {found}")
    return found


def overlap(folder: Folder) -> dict[str, Any]:
    """Time a GEMM beside an FA3 decode on two streams, by SMs that attention leaves free, and on split SMs."""
    import torch

    _needs_cuda()
    tokens, requests, context = 4096, 256, 1200
    activations = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16)

    def gemm() -> None:
        for _ in range(4):
            torch.mm(activations, weights)

    one = _decode(torch, requests, context)

    def attention(margin: int) -> None:
        for _ in range(ATTENTIONS):
            one(margin)

    streams = torch.cuda.Stream(priority=-1), torch.cuda.Stream()  # attention begins first, as in nano-batches
    whole = _seconds(lambda: attention(0))
    found: dict[str, Any] = {"margins": {}, "splits": {}}
    for margin in MARGINS:
        gemm_s, alone = _seconds(gemm), _seconds(lambda margin=margin: attention(margin))
        together = _together(torch, streams, lambda margin=margin: attention(margin), gemm)
        found["margins"][margin] = {
            "gemm_ms": round(1e3 * gemm_s, 3),
            "attention_ms": round(1e3 * alone, 3),
            "together_ms": round(1e3 * together, 3),
            # What is saved against one after the other, as a share of the shorter one: 1 is perfect.
            "hidden": round((gemm_s + whole - together) / min(gemm_s, whole), 3),
        }
    small = [margin for margin in MARGINS if margin <= MOST_MARGIN]
    found["best_margin"] = max(small, key=lambda margin: found["margins"][margin]["hidden"])
    path = folder.path / OVERLAP
    path.write_text(json.dumps(found, indent=1))  # before the splits, where a fault may end the process
    for share in SPLITS:
        try:
            found["splits"][share] = _on_split_sms(torch, share, gemm, lambda: attention(0))
        except Exception as error:  # a driver or a library without green contexts
            found["splits"][share] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    path.write_text(json.dumps(found, indent=1))
    return found


STAGES: dict[str, Callable[[Folder], dict[str, Any]]] = {"machine": machine, "kernels": kernels, "overlap": overlap}


def _needs_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise NoGpu("there is no GPU here")


def _seconds(run: Callable[[], Any], times: int = 5) -> float:
    """Return the median of several runs, by CUDA's events."""
    import torch

    warm = time.monotonic() + WARM_S  # an idle GPU takes a while to reach its clocks
    while time.monotonic() < warm:
        run()
        torch.cuda.synchronize()
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begin, end in spans:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in spans)[times // 2] / 1e3


def _together(torch: Any, streams: Any, *runs: Callable[[], Any]) -> float:
    """Return the seconds from the common begin of two runs, each on its stream, to the end of the later one."""

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream, run in zip(streams, runs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()
        for stream in streams:
            current.wait_stream(stream)

    return _seconds(both)


def _paged(torch: Any, generator: Any, queries: list[int], contexts: list[int]) -> tuple[Any, ...]:
    """Return queries, caches with one token a page, the page table and the lengths of a batch."""
    total = sum(contexts)
    make = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q = torch.randn(sum(queries), HEADS, HEAD_DIM, **make)
    k, v = (torch.randn(total, 1, KV_HEADS, HEAD_DIM, **make) for _ in range(2))
    table = torch.zeros(len(contexts), max(contexts), device="cuda", dtype=torch.int32)
    pages, at = torch.randperm(total, device="cuda", generator=generator, dtype=torch.int32), 0
    for row, length in enumerate(contexts):
        table[row, :length] = pages[at : at + length]
        at += length
    lengths = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    ends = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    return q, k, v, table, lengths, ends


def _fa3(
    q: Any, k: Any, v: Any, table: Any, lengths: Any, ends: Any, most_queries: int, sm_margin: int, out: Any = None
) -> Any:
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q=q,
        k_cache=k,
        v_cache=v,
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=ends,
        max_seqlen_q=most_queries,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
        sm_margin=sm_margin,
        out=out,
    )


def _attention_off(torch: Any, generator: Any, queries: list[int], contexts: list[int], sm_margin: int) -> float:
    """Return the largest difference between FA3 and attention in float64."""
    q, k, v, table, lengths, ends = _paged(torch, generator, queries, contexts)
    found = _fa3(q, k, v, table, lengths, ends, max(queries), sm_margin)
    worst, at = 0.0, 0
    for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        pages = table[row, :context].long()
        keys, values = (
            each[pages, 0].double().repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for each in (k, v)
        )
        asked = q[at : at + count].double().transpose(0, 1)
        scores = asked @ keys.transpose(1, 2) * HEAD_DIM**-0.5
        places = torch.arange(context, device="cuda")
        later = places[None, :] > places[context - count :, None]
        expected = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        off = (found[at : at + count].double().transpose(0, 1) - expected).abs() / (1 + expected.abs())
        worst = max(worst, float(off.nan_to_num(nan=math.inf).max()))
        at += count
    return worst


def _decode(torch: Any, requests: int, context: int) -> Callable[[int], Any]:
    """Return FA3's decode of so many requests, which takes the SMs to leave free."""
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, table, lengths, ends = _paged(torch, generator, [1] * requests, [context] * requests)
    out = torch.empty_like(q)  # or the allocator would tie the streams together
    return lambda margin: _fa3(q, k, v, table, lengths, ends, 1, margin, out)


def _on_split_sms(torch: Any, share: float, gemm: Callable[[], Any], attention: Callable[[], Any]) -> dict[str, Any]:
    """Time both on SMs of their own: how many SMs does attention need to read as fast as with all?

    `share`: of the SMs, for attention.
    """
    from sgl_kernel.spatial import create_greenctx_stream_by_value

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for_attention = int(share * sms) // 8 * 8
    ours = create_greenctx_stream_by_value(for_attention, sms - for_attention, 0)
    with torch.cuda.stream(ours[0]):
        alone = _seconds(attention)
    together = _together(torch, ours, attention, gemm)
    return {"sms": for_attention, "attention_ms": round(1e3 * alone, 3), "together_ms": round(1e3 * together, 3)}
