"""Gives requests back to their worker that have not begun, so that another worker can run them."""

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.withdrawal import read_withdrawal


def aborts_for(message: Any, waits: Callable[[], Mapping[str, Any]]) -> list[Any]:
    """Return the aborts that a message means: itself, or those of the requests that it withdraws.

    `waits` returns the requests that wait for a step, by rid. Those that had one before have output already.
    """
    found = read_withdrawal(message)
    if found is None:
        return [message]
    (rids, most), waiting = found, waits()
    return [AbortReq(rid=rid) for rid in rids if rid in waiting and not waiting[rid].output_ids][:most]


def abort(original: Callable[..., Any], scheduler: Any, message: Any) -> None:
    """Abort a request, or those that a withdrawal means, where SGLang's own policy schedules."""
    for each in aborts_for(message, lambda: {req.rid: req for req in scheduler.waiting_queue}):
        original(scheduler, each)


HOOKS = [("sglang.srt.managers.scheduler.Scheduler.abort_request", abort, HookType.AROUND)]
