"""Ends answers that repeat themselves, where their requests want that; thoughts that do are closed instead."""

from functools import cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.marks import stops_loops
from engine_ext.plugin.repeats import EVERY, LEAST, repeat_of
from engine_ext.plugin.scheduler.thinking import close


def end_loop(_: None, request: Any, *args: Any, **kwargs: Any) -> None:
    """End a request's answer where it has become a loop, after SGLang has looked for its end."""
    if not stops_loops(request) or request.finished():
        return
    ids = request.output_ids
    if len(ids) < getattr(request, "looks_at", LEAST):
        return
    due = repeat_of(ids).due_in
    if due == 0 and not close(request.grammar):
        request.finished_reason = _looped()(len(ids))
        request.finished_len = len(ids)
    request.looks_at = len(ids) + (min(due, EVERY) or EVERY)


@cache
def _looped() -> Any:
    """Return SGLang's reason of an answer that is cut off, with a word of ours that the worker reads."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    class Looped(FINISH_LENGTH):
        def to_json(self) -> dict[str, Any]:
            return super().to_json() | {"looped": True}

    return Looped


HOOKS = [("sglang.srt.managers.schedule_batch.Req.update_finish_state", end_loop, HookType.AFTER)]
