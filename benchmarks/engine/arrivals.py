"""Lets online requests arrive at their times on an emulated device's own clock, and notes when their tokens come.

A benchmark sends all requests before the first step. One that arrives later waits here, outside SGLang's queue, until
the clock has its time; when nothing else is to be done, the clock moves to the next arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.scheduler import emulated

ARRIVES = "batchweave_arrives_s"  # a mark: when an online request comes, on the device's clock
NEVER = -1.0  # before any arrival


@dataclass(slots=True)
class Times:
    """Says when an online request came and got its tokens, in seconds of the device's clock.

    `gap_s` is the longest time between two of its tokens.
    """

    arrives_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    generated: int = 0
    ended: bool = False
    gap_s: float = 0.0


@dataclass(eq=False)
class Arrivals:
    """Holds the online requests of one run, and counts the batch's tokens beside them.

    `until_s`: how long they arrive. `coming`: those that have yet to arrive, by time. `times`: by online request.
    `gaps`: seconds between their tokens. `generated`: output tokens of the batch's requests, by id, when a step first
    ends after `until_s`; `is_over`: whether one has.
    """

    until_s: float = 0.0
    coming: list[tuple[float, int, Any]] = field(default_factory=list[tuple[float, int, Any]])
    times: dict[str, Times] = field(default_factory=dict[str, Times])
    gaps: list[float] = field(default_factory=list[float])
    generated: dict[str, int] = field(default_factory=dict[str, int])
    is_over: bool = False
    _received: int = 0

    def hold(self, received: list[Any], now: float) -> list[Any]:
        """Hold what comes later, and return what is to be processed now, with those whose time has come."""
        others: list[Any] = []
        for each in received:
            arrives_s = _arrives_s(each)
            if arrives_s is None:
                others.append(each)
                continue
            self.times[each.rid] = Times(arrives_s)
            heappush(self.coming, (arrives_s, self._received, each))
            self._received += 1
        due: list[Any] = []
        while self.coming and self.coming[0][0] <= now:
            due.append(heappop(self.coming)[2])
        return [*due, *others]

    def stepped(self, reqs: list[Any], now: float) -> None:
        """Note the tokens that a step has brought, which ended `now`."""
        for req in reqs:
            generated = len(req.output_ids)
            if req.rid in self.times:
                if generated > self.times[req.rid].generated:
                    self._got_token(self.times[req.rid], req, now)
            elif not self.is_over:
                self.generated[req.rid] = generated
        self.is_over = now >= self.until_s

    def _got_token(self, times: Times, req: Any, now: float) -> None:
        if times.generated == 0:
            times.first_s = now
        else:
            self.gaps.append(now - times.last_s)
            times.gap_s = max(times.gap_s, now - times.last_s)
        times.last_s, times.generated = now, len(req.output_ids)
        times.ended = bool(req.finished())


def _arrives_s(received: Any) -> float | None:
    if not isinstance(received, TokenizedGenerateReqInput):
        return None
    arrives_s: Any = (received.sampling_params.custom_params or {}).get(ARRIVES)
    return None if arrives_s is None else float(arrives_s)


def arrivals_of(scheduler: Any) -> Arrivals:
    """Return the scheduler's arrivals; create them on first use."""
    found = getattr(scheduler, "batchweave_arrivals", None)
    if found is None:
        found = scheduler.batchweave_arrivals = Arrivals()
    return found


def report(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """Add what the online requests of this run got, by column, and the batch, where requests were announced.

    What the batch got is told when all have arrived: it is long, and asked for often before.
    """
    result = original(scheduler, *args)
    ours = arrivals_of(scheduler)
    if ours.until_s == 0:
        return result
    times = list(ours.times.values())
    columns = {name: [getattr(each, name) for each in times] for name in Times.__slots__}
    batch = {} if ours.coming else ours.generated
    found = {"held": len(ours.coming), "online": columns, "online_gaps": ours.gaps, "batch": batch}
    result.internal_state["batchweave_arrivals"] = found
    return result


def receive(original: Callable[..., Any], scheduler: Any, received: list[Any]) -> Any:
    """Process what has come by the device's clock; where nothing else is to be done, move to the next arrival."""
    ours, device = arrivals_of(scheduler), emulated.device_here()
    assert device is not None
    is_idle = ours.coming and not scheduler._engine_paused and scheduler.last_batch is None
    if is_idle and not received and scheduler.is_fully_idle():
        device.seconds = max(device.seconds, ours.coming[0][0])
    # Nothing arrives before the run begins: the requests of time 0 would be admitted while others are still sent.
    return original(scheduler, ours.hold(received, NEVER if scheduler._engine_paused else device.seconds))


def stepped(_result: Any, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Note the tokens of a step."""
    device = emulated.device_here()
    assert device is not None
    if arrivals_of(scheduler).until_s > 0:
        arrivals_of(scheduler).stepped(batch.reqs, device.seconds)


def sleep(original: Callable[..., Any], scheduler: Any) -> Any:
    """Sleep until a message comes, unless a request will arrive."""
    return None if arrivals_of(scheduler).coming else original(scheduler)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    (f"{_SCHEDULER}.get_internal_state", report, HookType.AROUND),
    (f"{_SCHEDULER}.process_input_requests", receive, HookType.AROUND),
    (f"{_SCHEDULER}.process_batch_result", stepped, HookType.AFTER),
    (f"{_SCHEDULER}.maybe_sleep_on_idle", sleep, HookType.AROUND),
]
