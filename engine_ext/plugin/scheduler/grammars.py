"""Bounds grammars: how many SGLang keeps, how long one may take to compile, and how long its tokens may take.

Validation bounds which schemas are accepted at all (`service/requests/body_limits.py`). A case that it misses ends here
as a fault of its own request, not of the engine.
"""

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.marks import KIND
from engine_ext.plugin.scheduler.blanks import learn, without
from engine_ext.plugin.scheduler.compiles import Compiles
from engine_ext.plugin.scheduler.thinking import bound

MOST_KEPT = 64
COMPILER_BYTES = 256 * 1024 * 1024
TIMED_OUT = "Grammar preprocessing timed out"  # SGLang's own words
# CPU seconds of the scheduler's thread, for which all requests wait, that one request's tokens may take: MOST_MASKS_S,
# and MASK_S more for each token.
MOST_MASKS_S, MASK_S = 0.1, 0.004
MOST_REMEMBERED, REMEMBERED_S = 1024, 600.0
_faults: dict[str, tuple[str, float]] = {}  # by grammar text: why it was too slow, and until when all are told so
log = logging.getLogger(__name__)


def set_cache(original: Callable[..., None], backend: Any, key: Any, value: Any) -> None:
    """Keep the newest grammars, but none that timed out: the machine was busy, and the next try may find it idle."""
    if getattr(value, "error_message", None) == TIMED_OUT:
        return
    original(backend, key, value)
    while len(backend.cache) > MOST_KEPT:
        del backend.cache[next(iter(backend.cache))]


def make_backend(original: Callable[..., None], backend: Any, *args: Any, **kwargs: Any) -> None:
    """Create the backend with a compiler whose own cache is bounded too."""
    from sglang.srt.constrained import xgrammar_backend as module

    before: Any = module.GrammarCompiler

    def compiler(tokenizer_info: Any, **more: Any) -> Any:
        learn(tokenizer_info.decoded_vocab, -(-tokenizer_info.vocab_size // 32))
        return before(tokenizer_info, cache_limit_bytes=COMPILER_BYTES, **more)

    module.GrammarCompiler = compiler  # type: ignore[assignment,misc]
    try:
        original(backend, *args, **kwargs)
        backend.executor = Compiles()
    finally:
        module.GrammarCompiler = before


def process_request(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Tell the compile threads whose grammar this is, in case they must compile it; bound how long it thinks."""
    compiles = getattr(manager.grammar_backend, "executor", None)
    if isinstance(compiles, Compiles):
        compiles.kind = str((request.sampling_params.custom_params or {}).get(KIND, ""))
    is_queued = original(manager, request)
    bound(manager, request)
    return is_queued


def ready_requests(original: Callable[..., Any], manager: Any) -> Any:
    """Count only the turns in which a request's grammar is being compiled, not those in which it waits for a thread."""
    for request in manager.grammar_queue:
        future = request.grammar
        if hasattr(future, "running") and not future.running():
            request.grammar_wait_ct = 0
    ready = original(manager)
    for request in ready:
        bound(manager, request)
    return ready


def fill_mask(original: Callable[..., None], grammar: Any, mask: Any, row: int) -> None:
    """Fill in the tokens that may come next. A grammar that allows none, or takes too long, ends its request.

    If no token may come next, the sampler fails on the whole batch.
    """
    if getattr(grammar, "fault", None) is None:
        fault, until = _faults.get(grammar.key_string, (None, 0.0))
        grammar.fault = fault if time.monotonic() < until else None
    if grammar.fault is not None:
        return
    begun = time.thread_time()
    original(grammar, mask, row)
    without(grammar, mask, row)
    grammar.masks_s = getattr(grammar, "masks_s", -MOST_MASKS_S) + time.thread_time() - begun - MASK_S
    if not mask[row].any():
        grammar.fault = "the grammar allows no further token: nothing satisfies it"
    elif grammar.masks_s > 0 and _is_alone():
        grammar.fault = "the schema is too ambiguous: the engine takes too long for its tokens"
        _faults[grammar.key_string] = (grammar.fault, time.monotonic() + REMEMBERED_S)
        if len(_faults) > MOST_REMEMBERED:
            del _faults[next(iter(_faults))]
    else:
        return
    log.warning(grammar.fault)  # and not the schema, which is a client's text
    mask[row].fill_(-1)


def _is_alone() -> bool:
    """Return whether this is the engine's only rank: ranks would measure different times, but must all do the same."""
    from sglang.srt.distributed import get_world_group

    return get_world_group().world_size == 1


def accept_tokens(original: Callable[..., Any], processor: Any, request: Any, tokens: Any) -> Any:
    """Blame the request if its grammar rejects a token that was the only one left by the request's other fields."""
    before = request.to_finish
    kept = original(processor, request, tokens)
    if request.to_finish is not before:
        _of(request).fault = "no token satisfies both the format and the request's other fields, such as min_tokens"
    return kept


def _of(request: Any) -> Any:
    """Return the grammar of a request; a reasoner's grammar is wrapped in another."""
    return getattr(request.grammar, "grammar", request.grammar)


def finish_state(original: Callable[..., None], request: Any, *args: Any, **kwargs: Any) -> None:
    """End a request whose grammar has a fault, as a bad request."""
    fault = getattr(_of(request), "fault", None)
    if fault is not None and not request.finished():
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        request.to_finish = FINISH_ABORT(f"response_format: {fault}", HTTPStatus.BAD_REQUEST, "BadRequestError")
    original(request, *args, **kwargs)


_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
_MODULE = "sglang.srt.constrained"
HOOKS = [
    (f"{_MODULE}.base_grammar_backend.BaseGrammarBackend.set_cache", set_cache, HookType.AROUND),
    (f"{_MODULE}.xgrammar_backend.XGrammarGrammarBackend.__init__", make_backend, HookType.AROUND),
    (f"{_MODULE}.xgrammar_backend.XGrammarGrammar.fill_vocab_mask", fill_mask, HookType.AROUND),
    (f"{_MODULE}.grammar_manager.GrammarManager.process_req_with_grammar", process_request, HookType.AROUND),
    (f"{_MODULE}.grammar_manager.GrammarManager.get_ready_grammar_requests", ready_requests, HookType.AROUND),
    (f"{_RESULTS}.SchedulerBatchResultProcessor._accept_grammar_tokens", accept_tokens, HookType.AROUND),
    ("sglang.srt.managers.schedule_batch.Req.update_finish_state", finish_state, HookType.AROUND),
]
