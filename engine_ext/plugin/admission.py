"""Admission by rank: the plan, not SGLang's policy, says which waiting request prefills next.

Ranked requests wait in a heap of our own, because SGLang's waiting queue costs time in every step for every request
in it. Each step sees at most `CANDIDATES` of them. Requests without a rank keep SGLang's own queue and go first.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

RANK = "batchweave_rank"
CANDIDATES = 256
RECENT = 4096

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class Backlog:
    """Ranked requests that wait for prefill, lowest rank first, first come first served within a rank."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._arrival = count()
        self.admitted = 0
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.recent_ids: deque[str] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, req: Any) -> None:
        heapq.heappush(self._heap, (rank_of(req), next(self._arrival), req))

    def pop(self, n: int) -> list[Any]:
        return [heapq.heappop(self._heap)[2] for _ in range(min(n, len(self._heap)))]

    def take(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Remove the requests that are wanted; costs a look at each, and no more when there are none."""
        found = [entry[2] for entry in self._heap if wanted(entry[2])]
        if found:
            self._heap = [entry for entry in self._heap if not wanted(entry[2])]
            heapq.heapify(self._heap)
        return found

    def record(self, admitted: list[Any]) -> None:
        self.admitted += len(admitted)
        self.recent.extend(rank_of(req) for req in admitted)

    def record_batch(self, batch: Any, continued: Any) -> None:
        """Note whose prefill begins with this batch, ranked or not; `continued` is in it with another chunk."""
        if batch is not None:
            self.recent_ids.extend(req.rid for req in batch.reqs if req is not continued and not req.output_ids)


def is_ranked(req: Any) -> bool:
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and RANK in params


def rank_of(req: Any) -> int:
    return req.sampling_params.custom_params[RANK]


def backlog_of(scheduler: Any) -> Backlog:
    found = getattr(scheduler, "batchweave_backlog", None)
    if found is None:
        found = scheduler.batchweave_backlog = Backlog()
    return found


def take_ranked(scheduler: Any) -> list[Any]:
    """Remove the ranked requests from SGLang's waiting queue and return them in its order."""
    ranked = [req for req in scheduler.waiting_queue if is_ranked(req)]
    if ranked:
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if not is_ranked(req)]
    return ranked


def enqueue(original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, req, *args, **kwargs)
    queue = scheduler.waiting_queue
    if queue and queue[-1] is req and is_ranked(req):
        backlog_of(scheduler).push(queue.pop())


def admit(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Show SGLang the next candidates in rank order; what it leaves returns to the backlog."""
    backlog = backlog_of(scheduler)
    running = kwargs["running_batch"]
    candidates: list[Any] = []
    if backlog and not running.batch_is_full:
        slots = scheduler.get_num_allocatable_reqs(len(running.reqs))
        candidates = backlog.pop(min(CANDIDATES, max(slots, 0)))
        scheduler.waiting_queue = [*scheduler.waiting_queue, *candidates]
    continued = scheduler.chunked_req
    try:
        found = original(scheduler, *args, **kwargs)
        backlog.record_batch(found[0], continued)
        return found
    finally:
        left = take_ranked(scheduler)
        for req in left:
            backlog.push(req)
        kept = {id(req) for req in left}
        backlog.record([req for req in candidates if id(req) not in kept])


def abort(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Show SGLang the waiting requests that an abort means; it takes them out itself."""
    meant = backlog_of(scheduler).take(lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid))
    scheduler.waiting_queue = [*scheduler.waiting_queue, *meant]
    return original(scheduler, recv_req)


def is_fully_idle(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    return original(scheduler, *args, **kwargs) and not backlog_of(scheduler)


def report(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Add batchweave's part to SGLang's internal state: how the worker knows that the plugin is in."""
    backlog = backlog_of(scheduler)
    result.internal_state["batchweave"] = {
        "hooks": sorted(HookRegistry._patched),  # pyright: ignore[reportPrivateUsage]
        "waiting": len(backlog),
        "admitted": backlog.admitted,
        "recent_ranks": list(backlog.recent),
        "recent_ids": list(backlog.recent_ids),
    }
    return result


HOOKS = [
    (f"{_SCHEDULER}._add_request_to_queue", enqueue, HookType.AROUND),
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", admit, HookType.AROUND),
    (f"{_SCHEDULER}.abort_request", abort, HookType.AROUND),
    (f"{_SCHEDULER}.is_fully_idle", is_fully_idle, HookType.AROUND),
    (f"{_SCHEDULER}.get_internal_state", report, HookType.AFTER),
]
