"""SGLang's tokenizer manager for its serving classes that name no request and tell the scheduler nothing of it.

Each request gets the rid by which it can be aborted and the mark of its kind; what SGLang says of its end is kept.
"""

from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput
from sglang.srt.managers.tokenizer_manager_score_mixin import TokenizerManagerScoreMixin

from engine_ext.plugin.marks import KIND


@dataclass(slots=True)
class Told:
    """What is known of one request while it runs; SGLang runs it as `parts` requests of its own (0: as one)."""

    rid: str
    kind: str
    parts: int = 0
    sent: bool = False  # what fails before is the request's own fault
    aborted: bool = False
    stopped_by_length: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0


told: ContextVar[Told] = ContextVar("told")


class MarkedManager(TokenizerManagerScoreMixin):
    """A tokenizer manager whose requests carry what `told` says in the task that sends them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        known = told.get()
        known.parts, known.sent = _parts(obj), True
        # Of a list of embeddings SGLang wants a name each, of all else it makes them itself, in the same way.
        named = known.parts and isinstance(obj, EmbeddingReqInput)
        obj.rid = [f"{known.rid}_{part}" for part in range(known.parts)] if named else known.rid
        parameters: Any = obj.sampling_params or {}
        obj.sampling_params = {**parameters, "custom_params": {KIND: known.kind}}
        async for found in self._manager.generate_request(obj, request):
            for each in found if isinstance(found, list) else [found]:
                _note(known, each["meta_info"])
            yield found


def _note(known: Told, meta: dict[str, Any]) -> None:
    reason = (meta.get("finish_reason") or {}).get("type")
    known.aborted |= reason == "abort"
    known.stopped_by_length |= reason == "length"
    known.prompt_tokens += meta.get("prompt_tokens") or 0
    known.cached_tokens += meta.get("cached_tokens") or 0


def _parts(obj: Any) -> int:
    """How many requests SGLang makes of it; 0 for one that keeps its name."""
    if isinstance(obj.text, list):
        return len(obj.text)
    ids = obj.input_ids
    return len(ids) if ids and isinstance(ids[0], list) else 0
