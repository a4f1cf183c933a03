"""Computes a step with prompts and decodes as two halves, so that the GEMM of one hides the KV reads of the other.

BlendServe (section 2.3) and NanoFlow overlap inside a step: while one half computes, the other reads its KV cache. Here
each half runs SGLang's own model on its requests. When a half comes to an attention, that is launched on a second
stream, and the other half has its turn. This was seen to give equal answers on a CPU, and has not run on a GPU yet.
"""

import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from sglang.srt.batch_overlap.two_batch_overlap import TboForwardBatchPreparer
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.costs.cost import CostModel
from engine_ext.plugin.options import Overlap, mine

log = logging.getLogger(__name__)
REST = 256  # steps that run whole after one that SGLang could not split


@dataclass
class Books:
    """What this process has done.

    `turns`: attentions at which a half gave its turn away. `refused`: why SGLang could not split a step, said once;
    `resting`: steps that run whole after that, because each attempt formats the whole step for its message.
    """

    split: int = 0
    turns: int = 0
    refused: str | None = None
    resting: int = 0


books = Books()


class HalfBackend:
    """The attention backend of one half: SGLang's, on a stream of its own, after which the other half has its turn.

    `stream`: None on a CPU, where each half waits for its attention.
    """

    def __init__(self, backend: Any, stream: Any) -> None:
        self.backend, self.stream = backend, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.stream is None:
            found = self.backend.forward(*args, **kwargs)
            _give_turn()
            return found
        gemms = torch.cuda.current_stream()
        self.stream.wait_stream(gemms)
        # What the attention allocates is used again only by a later one, which waits for the GEMMs before it.
        with torch.cuda.stream(self.stream), _leaving_sms():
            found = self.backend.forward(*args, **kwargs)
        done = self.stream.record_event()
        _give_turn()
        gemms.wait_event(done)
        return found


_margin = 0  # SMs that FA3 leaves free, in the attention of a half only


@contextmanager
def _leaving_sms() -> Generator[None]:
    global _margin
    _margin = mine().sm_margin
    try:
        yield
    finally:
        _margin = 0


def _with_margin(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Pass `sm_margin` to FA3, whose persistent blocks would fill every SM, so that no GEMM could run beside them."""

    @wraps(attention)
    def found(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs, sm_margin=_margin) if _margin else attention(*args, **kwargs)

    return found


def _give_turn() -> None:
    books.turns += 1
    caller = getcurrent().parent
    assert caller is not None
    caller.switch()


def in_turns(runs: Sequence[tuple[Any, Callable[[], Any]]]) -> list[Any]:
    """Run each function under its forward context until it gives its turn to the next; return what they return."""
    turns = [greenlet(run) for _, run in runs]
    for turn in turns:
        turn.gr_context = copy_context()
    found: list[Any] = [None] * len(runs)
    while not all(turn.dead for turn in turns):
        for k, turn in enumerate(turns):
            if not turn.dead:
                with forward_context(runs[k][0]):
                    found[k] = turn.switch()
    return found


def best_cut(tokens: Sequence[int], contexts: Sequence[int], cost: CostModel) -> int:
    """Return how many requests the first half has; 0 if the step is expected to be faster as a whole.

    `tokens`: what each request computes in this step. `contexts`: the KV tokens that it reads.
    """
    gemm = np.cumsum(tokens)[:-1] * cost.gemm_s_per_token, np.sum(tokens) * cost.gemm_s_per_token
    reads = np.cumsum(contexts)[:-1] * cost.read_s_per_token, np.sum(contexts) * cost.read_s_per_token
    if len(gemm[0]) == 0:
        return 0
    # Each half reads all the weights.
    first, second = np.maximum(gemm[0], cost.weights_s), np.maximum(gemm[1] - gemm[0], cost.weights_s)
    halves = np.maximum(first, reads[1] - reads[0]) + np.maximum(second, reads[0])
    best = int(np.argmin(halves))
    return best + 1 if halves[best] < max(gemm[1], cost.weights_s) + reads[1] else 0


def prepare(result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Give the model an attention backend for each half, because a backend knows one batch at a time."""
    stream = torch.cuda.Stream() if torch.cuda.is_available() and runner.device == "cuda" else None
    backends = [HalfBackend(runner._get_attention_backend(), stream) for _ in range(2)]
    if mine().sm_margin:
        module = sys.modules[type(backends[0].backend).__module__]  # which calls FA3 by these names
        for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
            if hasattr(module, name):
                setattr(module, name, _with_margin(getattr(module, name)))
    runner.model.model.batchweave_halves = backends
    return result


def forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    positions: Any,
    forward_batch: Any,
    input_embeds: Any = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """Compute the hidden states of a step that has both prompts and decodes in two halves, where that is faster."""
    whole = partial(original, model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    if forward_batch.forward_mode is not ForwardMode.MIXED or input_embeds is not None or model.layers_to_capture:
        return whole()
    halves = _halves(forward_batch)
    if halves is None:
        return whole()
    books.split += 1
    context, runs = get_forward_context(), list[tuple[Any, Callable[[], Any]]]()
    for half, backend in zip(halves, model.batchweave_halves, strict=True):
        backend.init_forward_metadata(half)
        run = partial(original, model, half.input_ids, half.positions, half)
        runs.append((replace(context, attn_backend=backend), run))
    return torch.cat(in_turns(runs))


def _halves(batch: Any) -> list[Any] | None:
    if books.resting > 0:
        books.resting -= 1
        return None
    tokens = batch.extend_seq_lens_cpu
    cut = best_cut(tokens, batch.seq_lens_cpu.tolist(), mine().cost)
    if cut == 0:
        return None
    tokens_cut, tokens_end = sum(tokens[:cut]), sum(tokens)
    padding: Any = None  # these steps have none
    filter_batch = partial(TboForwardBatchPreparer.filter_batch, batch, out_num_token_non_padded=padding)
    try:
        return [
            filter_batch(start_token_index=0, end_token_index=tokens_cut, start_seq_index=0, end_seq_index=cut),
            filter_batch(
                start_token_index=tokens_cut,
                end_token_index=tokens_end,
                start_seq_index=cut,
                end_seq_index=batch.batch_size,
            ),
        ]
    except Exception as error:  # SGLang raises nothing narrower for a field that it cannot split
        if books.refused is None:
            log.warning("steps like this one run whole, because SGLang cannot split them: %s", str(error)[:500])
        books.refused, books.resting = str(error)[:500], REST
        return None


def report() -> dict[str, Any]:
    """Return how many steps ran as two halves, if that is what the engine was asked for, and why others could not."""
    if mine().overlap is not Overlap.NANO:
        return {}
    return {"nano_steps": books.split, "nano_turns": books.turns, "nano_refused": books.refused}


HOOKS = [
    ("sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends", prepare, HookType.AFTER),
    # Those of `worker/overlap.py`'s MODELS; Qwen3's is Qwen2's.
    ("sglang.srt.models.llama.LlamaModel.forward", forward, HookType.AROUND),
    ("sglang.srt.models.qwen2.Qwen2Model.forward", forward, HookType.AROUND),
]
