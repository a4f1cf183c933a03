"""Admission by dual scan: which waiting requests prefill in a step, and how many tokens of it prompts may have.

Requests of ours wait outside SGLang's queue, whose cost per step grows with its length. Each step the scan is told
what the KV cache really holds and says whom to let in; SGLang is shown these alone. Requests without our mark keep
SGLang's own queue and go first.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_ext.costs.cost import CostModel
from engine_ext.plan.lengths import LONGEST, UNKNOWN
from engine_ext.plugin.marks import KIND, UNTOLD
from engine_ext.plugin.options import Overlap, Scheduling, handed_over
from engine_ext.plugin.scheduler import emulated
from engine_ext.plugin.scheduler.pins import Pins
from engine_ext.plugin.scheduler.steps import books_of
from engine_ext.scan.live import LiveScan
from engine_ext.scan.state import StepCosts

RECENT = 4096
SOON = 64  # steps for which those that run must find room beside prefixes that are kept
LOOK_AGAIN = 16  # steps in which the cache is asked once more for the same request
STEP_TOKENS = 8192  # the largest step where SGLang names none

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


@dataclass(eq=False)
class Admission:
    """The requests of ours in one scheduler, and the scan that admits them."""

    scan: LiveScan
    overlap: Overlap
    pins: Pins
    waiting: dict[str, Any] = field(default_factory=dict[str, Any])  # by rid
    running: dict[Any, int] = field(default_factory=dict[Any, int])  # SGLang's requests and their keys
    prefilling: dict[Any, int] = field(default_factory=dict[Any, int])  # those of `running` that are not decoding yet
    storing: dict[Any, int] = field(default_factory=dict[Any, int])  # prompts computed, and output tokens before that
    keys: dict[str, int] = field(default_factory=dict[str, int])
    by_key: dict[int, Any] = field(default_factory=dict[int, Any])
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    next_key: int = 0
    decoded: int = 0
    admitted: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    cached_tokens: int = 0  # of prompts, when their prefill began for the first time
    prompt_tokens: int = 0
    held_back: int = 0
    steps: int = 0
    deciding_s: float = 0.0
    cache_changed: bool = False
    recent_ids: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))

    @classmethod
    def of(cls, cost: CostModel, capacity: int, step_tokens: int, overlap: Overlap, tree: Any) -> "Admission":
        costs = StepCosts.of(cost, capacity, step_tokens, bursts=overlap is not Overlap.MIXED)
        return cls(LiveScan(cost, costs), overlap, Pins(tree, capacity))

    def add(self, req: Any) -> None:
        """A request that waits now, for the first time or because its KV cache was taken back."""
        self.waiting[req.rid] = req
        if req in self.running:
            key = self.running.pop(req)
            self.prefilling.pop(req, None)
            self.storing.pop(req, None)
            self.retractions += 1
            self.retracted_tokens += len(req.origin_input_ids) + len(req.output_ids)
            self.scan.retracted(key, len(req.output_ids))
            return
        key = self.keys[req.rid] = self.next_key
        self.next_key += 1
        self.by_key[key] = req
        params = req.sampling_params
        known = params.max_new_tokens if params.ignore_eos and not params.stop_strs else UNKNOWN
        cap = params.max_new_tokens
        if params.custom_params.get(UNTOLD):
            known, cap = UNKNOWN, LONGEST
        kind = self.kinds.setdefault(str(kind_of(req)), len(self.kinds))
        self.scan.add(key, np.asarray(req.origin_input_ids, dtype=np.uint32), cap, known, kind)

    def take_back(self, rid: str, everything: bool) -> list[Any]:
        """Waiting requests that an abort means: the one of this id, or those whose ids begin with it."""
        if everything:
            meant = list(self.waiting)
        elif rid in self.waiting:
            meant = [rid]
        else:
            meant = [each for each in self.waiting if each.startswith(rid)]
        found = [self.waiting.pop(each) for each in meant]
        for req in found:
            self.scan.take_back(self._forget(req))
        if not self.waiting:
            self.pins.keep([], again=False)
        return found

    def keep_prefixes(self, changed: bool, free: int) -> None:
        """Whatever is cached for whom each end gives next stays.

        Nothing stays when nobody waits, when nobody runs, for then whoever comes next may need it all, or when the
        `free` tokens would not last for those that run. `changed`: the cache may hold more than before.
        """
        self.cache_changed |= changed
        if not self.waiting or not self.running or free < SOON * (len(self.running) + 1):
            self.pins.keep([], again=False)
            return
        again = self.cache_changed and self.steps % LOOK_AGAIN == 0
        self.pins.keep([self.by_key[key] for key in self.scan.next_keys], again)
        self.cache_changed &= not again

    def notice_ends(self, here: list[Any], continued: Any) -> bool:
        """Whoever ran and is gone has ended; whether anyone has."""
        gone = self.running.keys() - here
        for req in gone:
            if req is continued:
                continue
            key, tokens = self.running.pop(req), len(req.output_ids)
            self._forget(req)
            self.storing.pop(req, None)
            if self.prefilling.pop(req, None) is None and not isinstance(req.finished_reason, FINISH_ABORT):
                self.scan.finished(key, tokens)
            else:
                self.scan.dropped(key, tokens)
        return bool(gone)

    def let_in(self, reqs: list[Any]) -> None:
        for req in reqs:
            key = self.keys[req.rid]
            del self.waiting[req.rid]
            self.running[req] = self.prefilling[req] = key
        self.admitted += len(reqs)

    def hold(self, reqs: list[Any]) -> None:
        """SGLang did not take them."""
        for req in reversed(reqs):
            self.scan.held(self.keys[req.rid])
        self.held_back += len(reqs)

    def prefilled(self, continued: Any) -> None:
        """A batch of prompts runs: all that were let in are in it to their end, but the one that has more chunks."""
        is_stored = self.overlap is Overlap.PDMUX
        for req in [each for each in self.prefilling if each is not continued]:
            self.scan.prefilled(self.prefilling.pop(req), is_stored)
            if not is_stored:
                self.storing[req] = len(req.output_ids)

    def store_all(self) -> None:
        """Beside decodes a prefill has ended, its first tokens and all, when SGLang asks for the next."""
        for key in self.prefilling.values():
            self.scan.stored(key)

    def notice_stored(self) -> None:
        """SGLang puts a prompt into its cache with the first token of the answer: later than the next step begins.

        Its overlap schedule launches a step before it looks at what came of the one before.
        """
        for req in [each for each, tokens in self.storing.items() if len(each.output_ids) > tokens]:
            del self.storing[req]
            self.scan.stored(self.running[req])

    def note(self, batch: Any, continued: Any) -> None:
        """Keep whose prefill begins with this batch, of ours or not; `continued` is in it with another chunk."""
        if batch is None:
            return
        prompts = len(batch.reqs) - len(batch.decoding_reqs or ())  # decodes that ride in it come last
        for req, cached in zip(batch.reqs[:prompts], batch.prefix_lens, strict=False):
            if req is continued or req.output_ids:
                continue
            self.recent_ids.append(req.rid)
            if is_ours(req):
                self.prompt_tokens += len(req.origin_input_ids)
                self.cached_tokens += cached

    def _forget(self, req: Any) -> int:
        key = self.keys.pop(req.rid)
        del self.by_key[key]
        return key


def is_ours(req: Any) -> bool:
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and KIND in params


def kind_of(req: Any) -> Any:
    return req.sampling_params.custom_params[KIND]


def admission_of(scheduler: Any) -> Admission:
    found = getattr(scheduler, "batchweave_admission", None)
    if found is None:
        options = handed_over()
        assert options is not None
        found = Admission.of(
            options.cost,
            int(scheduler.max_total_num_tokens),
            int(scheduler.chunked_prefill_size or STEP_TOKENS),
            overlap_of(scheduler),
            scheduler.tree_cache,
        )
        found.scan.cached = lambda key: _cached_tokens(scheduler, found.by_key[key])
        scheduler.batchweave_admission = found
    return found


def overlap_of(scheduler: Any) -> Overlap:
    """What SGLang does, whatever it was asked for."""
    if scheduler.enable_pdmux:
        return Overlap.PDMUX
    return Overlap.MIXED if scheduler.is_mixed_chunk else Overlap.NONE


def _cached_tokens(scheduler: Any, req: Any) -> int:
    key = RadixKey(req.origin_input_ids, req.extra_key)
    return len(scheduler.tree_cache.match_prefix(MatchPrefixParams(key)).device_indices)


def enqueue(original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, req, *args, **kwargs)
    queue = scheduler.waiting_queue
    if queue and queue[-1] is req and is_ours(req):
        admission_of(scheduler).add(queue.pop())


def admit(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Show SGLang whom the scan lets in, in its order, and as many tokens as it allows."""
    ours, running = admission_of(scheduler), kwargs["running_batch"]
    changed = ours.notice_ends(running.reqs, scheduler.chunked_req)
    ours.notice_stored()
    is_beside = ours.overlap is Overlap.PDMUX  # decodes go on during a prefill, and SGLang asks between two of them
    if is_beside and scheduler._engine_paused:  # its loop would go on
        return None, running
    if is_beside:
        ours.store_all()
    if not ours.running:
        ours.pins.keep([], again=False)
    continued = scheduler.chunked_req
    if not ours.waiting and not ours.running:
        found = original(scheduler, *args, **kwargs)
        ours.note(found[0], continued)
        return found
    started = time.perf_counter()
    step = _decide(ours, scheduler, running)
    if is_beside:  # from here on they decode: what was decoded during their prefill was not theirs
        ours.prefilled(None)
    candidates = [ours.by_key[key] for key in step.admitted]
    ours.deciding_s += time.perf_counter() - started
    ours.steps += 1
    ours.decoded = 0 if is_beside else 1
    if step.budget == 0 and not scheduler.waiting_queue:
        ours.hold(candidates)
        ours.keep_prefixes(changed, _free_tokens(scheduler))
        return None, running
    chunk = scheduler.chunked_prefill_size
    scheduler.waiting_queue = [*scheduler.waiting_queue, *candidates]
    page, riding = scheduler.page_size, len(running.reqs) if ours.overlap is Overlap.MIXED else 0
    if not is_beside:  # where whole prompts are computed
        scheduler.chunked_prefill_size = -(-step.budget // page) * page + riding
    if candidates:
        running.batch_is_full = False  # the scan has seen to the room
    global _choosing
    _choosing = True
    try:
        batch, running = original(scheduler, *args, **kwargs)
    finally:
        _choosing = False
        scheduler.chunked_prefill_size = chunk
        left = {req for req in scheduler.waiting_queue if is_ours(req)}
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req not in left]
    ours.hold([req for req in candidates if req in left])
    ours.let_in([req for req in candidates if req not in left])
    ours.note(batch, continued)
    if batch is not None and not is_beside:
        ours.prefilled(scheduler.chunked_req)
        ours.decoded = int(batch.decoding_reqs is not None)
    ours.keep_prefixes(changed or batch is not None, _free_tokens(scheduler))
    return batch, running


def _free_tokens(scheduler: Any) -> int:
    """Of the KV cache, what is free or can be evicted."""
    return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())


def _decide(ours: Admission, scheduler: Any, running: Any) -> Any:
    free = _free_tokens(scheduler)
    continued = scheduler.chunked_req
    pending = 0
    if continued is not None:
        pending = len(continued.origin_input_ids) + len(continued.output_ids) - len(continued.prefix_indices)
    decoding = len(running.reqs)
    reads = int(running.seq_lens_cpu.sum()) if decoding else 0
    slots = max(0, scheduler.get_num_allocatable_reqs(decoding) - (continued is not None))
    used = int(scheduler.max_total_num_tokens) - free + pending
    return ours.scan.decide(used, reads, decoding, pending, ours.decoded, slots)


_choosing = False  # whether SGLang is adding requests that the scan lets in


def reserve_nothing(original: Callable[..., None], adder: Any, *args: Any, **kwargs: Any) -> None:
    """The scan has counted what those that run will still hold, by what is known of their lengths."""
    original(adder, *args, **kwargs)
    if _choosing:
        adder.rem_total_token_offset = adder.cur_rem_token_offset


def add_one(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    if not _choosing:
        return original(adder, req, *args, **kwargs)
    to_come = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    adder.rem_total_token_offset -= min(to_come, CLIP_MAX_NEW_TOKENS)
    try:
        return original(adder, req, *args, **kwargs)
    finally:
        adder.rem_total_token_offset = adder.cur_rem_token_offset


def abort(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Show SGLang the waiting requests that an abort means; it takes them out itself."""
    meant = admission_of(scheduler).take_back(recv_req.rid, recv_req.abort_all)
    scheduler.waiting_queue = [*scheduler.waiting_queue, *meant]
    return original(scheduler, recv_req)


def is_fully_idle(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    return original(scheduler, *args, **kwargs) and not admission_of(scheduler).waiting


def report(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Add batchweave's part to SGLang's internal state: how the worker knows that the plugin is in."""
    options = handed_over()
    found: dict[str, Any] = {
        "hooks": sorted(HookRegistry._patched),  # pyright: ignore[reportPrivateUsage]
        "device": None,
        "overlap": overlap_of(scheduler).value,
        "kv_capacity": int(scheduler.max_total_num_tokens),
        "queued": len(scheduler.waiting_queue),
    }
    if options and options.scheduling is Scheduling.DUAL_SCAN:
        ours = admission_of(scheduler)
        compute_s, memory_s = ours.scan.remaining_s
        found |= {
            "waiting": len(ours.waiting),
            "running": sum(not req.finished() for req in ours.running),
            "admitted": ours.admitted,
            "held_back": ours.held_back,
            "plans": ours.scan.plans,
            "decisions": ours.steps,
            "deciding_s": ours.deciding_s,
            "retractions": ours.retractions,
            "retracted_tokens": ours.retracted_tokens,
            "admitted_prompt_tokens": ours.prompt_tokens,
            "admitted_cached_tokens": ours.cached_tokens,
            "expected_cached_tokens": ours.scan.expected_cached,
            "remaining_compute_s": compute_s,
            "remaining_memory_s": memory_s,
            "kv_kept": ours.pins.tokens,
            "kv_of_left": ours.scan.kv_tokens[0],
            "kv_of_right": ours.scan.kv_tokens[1],
            "recent_ids": list(ours.recent_ids),
        }
    if options:
        found |= books_of(scheduler).report()
    found |= emulated.books()
    result.internal_state["batchweave"] = found
    return result


HOOKS = [
    (f"{_SCHEDULER}._add_request_to_queue", enqueue, HookType.AROUND),
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", admit, HookType.AROUND),
    (f"{_SCHEDULER}.abort_request", abort, HookType.AROUND),
    (f"{_SCHEDULER}.is_fully_idle", is_fully_idle, HookType.AROUND),
    (f"{_ADDER}.__init__", reserve_nothing, HookType.AROUND),
    (f"{_ADDER}.add_one_req", add_one, HookType.AROUND),
]
REPORT = [(f"{_SCHEDULER}.get_internal_state", report, HookType.AFTER)]
