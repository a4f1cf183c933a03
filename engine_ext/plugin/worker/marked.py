"""Wraps SGLang's tokenizer manager for those of its serving classes that neither name nor mark their requests.

Each request gets an rid, by which it can be aborted, and the mark of its kind if it is a batch's. What SGLang reports
when it ends is kept.
"""

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput
from sglang.srt.managers.tokenizer_manager_score_mixin import TokenizerManagerScoreMixin

from engine_ext.coserve.slo import DEFAULT
from engine_ext.plugin.marks import NO_TERMS, Terms, marks, online_marks


@dataclass(slots=True)
class Told:
    """What is known of one request while it runs; SGLang splits it into `parts` requests (0: it runs as one).

    `kind`: see `EngineHost.run`; ONLINE for an online request, of the class `slo` and this `project`.
    """

    rid: str
    kind: str
    parts: int = 0
    sent: bool = False  # a failure before that is the request's own fault
    aborted: bool = False
    stopped_by_length: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    terms: Terms = NO_TERMS  # of a batch's request
    slo: str = DEFAULT
    project: str = ""
    looped: bool = False  # the engine ended it because it repeats itself
    weight: float = 1.0  # of the project of an online request
    text: dict[str, Any] | None = None  # how a response's text must look, which its answer repeats
    fault: str | None = None  # why SGLang refuses it
    cancelled: bool = False  # the task was; SGLang may make an answer of that


ONLINE = ""  # the kind of online requests, which is no kind of a batch
told: ContextVar[Told] = ContextVar("told")


class MarkedManager(TokenizerManagerScoreMixin):
    """A tokenizer manager that gives each request the rid and kind from `told` in the task that sends it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        known = told.get()
        known.parts, known.sent = _parts(obj), True
        # For a list of embeddings SGLang expects an rid each; for all other lists it makes them itself, in this form.
        named = known.parts and isinstance(obj, EmbeddingReqInput)
        obj.rid = [f"{known.rid}_{part}" for part in range(known.parts)] if named else known.rid
        parameters: Any = obj.sampling_params or {}
        obj.sampling_params = {**parameters, "custom_params": _marks(known)}
        try:
            async for found in self._manager.generate_request(obj, request):
                for each in found if isinstance(found, list) else [found]:
                    _note(known, each["meta_info"])
                yield found
        except ValueError as error:
            known.fault = str(error)
            raise
        except asyncio.CancelledError:
            known.cancelled = True
            raise


def _marks(known: Told) -> dict[str, Any] | None:
    if known.kind:
        return marks(known.kind, known.terms)
    return online_marks(known.slo, known.project, known.weight) or None


def _note(known: Told, meta: dict[str, Any]) -> None:
    finish: dict[str, Any] = meta.get("finish_reason") or {}
    reason = finish.get("type")
    known.aborted |= reason == "abort"
    if reason == "abort" and finish.get("status_code") == HTTPStatus.BAD_REQUEST:
        known.fault = str(finish.get("message"))
    known.stopped_by_length |= reason == "length"
    known.looped |= finish.get("looped", False)
    if reason is not None:  # a stream reports after each token
        known.prompt_tokens += meta.get("prompt_tokens") or 0
        known.cached_tokens += meta.get("cached_tokens") or 0


def _parts(obj: Any) -> int:
    """Return how many requests SGLang splits this one into; 0 for one that keeps its rid."""
    if isinstance(obj.text, list):
        return len(obj.text)
    ids = obj.input_ids
    return len(ids) if ids and isinstance(ids[0], list) else 0
