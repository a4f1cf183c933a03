"""SGLang's serving of chats and completions, with long work beside the event loop (`aside.py`)."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from fastapi import HTTPException
from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import ChoiceLogprobs
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from engine_ext.plugin.worker import patience, tool_schemas
from engine_ext.plugin.worker.ahead import tokenize_ahead
from engine_ext.plugin.worker.aside import LARGE, aside
from engine_ext.plugin.worker.logprobs import logprobs_of, with_logprobs
from engine_ext.plugin.worker.marked import Told
from engine_ext.plugin.worker.stop_lengths import Sampling

MANY_LOGPROBS = 2000  # log probabilities that take some 15 ms to write


class Written(NamedTuple):
    """An answer in JSON; `aborted`: whether the request was; `looped`: whether the engine ended it as a loop."""

    body: bytes
    aborted: bool
    looped: bool


class Serving(OpenAIServingBase):
    """Converts long bodies, and builds long answers, in a thread.

    What SGLang cannot parse is the request's own, permanent fault; SGLang answers some of it with 500.
    """

    def __init__(self, manager: Any, templates: Any) -> None:
        super().__init__(manager, templates)  # pyright: ignore[reportCallIssue]
        self._converted: dict[str, Any] = {}  # by rid

    async def answer(self, request: Any, text_bytes: int, known: Told) -> Any:
        """Answer a request with so much text. Whatever this returns of an aborted one is no answer."""
        try:
            tools = getattr(request, "tools", None) or []
            if tool_schemas.are_many([each.function.parameters for each in tools]):
                await aside(partial(self._validate_request, request), True)  # which remembers what it finds
            if text_bytes > LARGE:
                self._converted[request.rid] = await aside(partial(self._convert, request, None), True)
            if known.aborted:
                return None
            return await self.handle_request(request, None)  # type: ignore[arg-type]
        finally:
            self._converted.pop(request.rid, None)

    def _convert(self, request: Any, raw_request: Any) -> Any:
        """Return SGLang's request, or the error that refuses it."""
        try:
            return super()._convert_to_internal_request(request, raw_request)  # type: ignore[safe-super]
        except (ValueError, HTTPException) as error:
            return error
        except Exception as error:
            return ValueError(f"{type(error).__name__}: {error}")

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
        found = self._converted.get(request.rid) or self._convert(request, raw_request)
        if isinstance(found, Exception):
            raise found
        return found

    async def _handle_non_streaming_request(self, adapted_request: Any, request: Any, raw_request: Any) -> Any:
        try:
            found = await self.tokenizer_manager.generate_request(adapted_request, raw_request).__anext__()
        except ValueError as error:
            return self.create_error_response(str(error))
        answers = found if isinstance(found, list) else [found]
        if len(answers) > 1 and (getattr(request, "tools", None) or getattr(self, "reasoning_parser", None)):
            await self._parse_each(request, answers)
        return await aside(partial(self._write, request, answers), _logprobs(answers) > MANY_LOGPROBS)

    async def _parse_each(self, request: Any, answers: list[Any]) -> None:
        """Have the parsers read each answer in a turn of its own; SGLang reads all of them at once, and finds this."""
        for each in answers:
            await patience.turn()
            about = each["meta_info"]
            reason = dict(about.get("finish_reason") or {}) or None  # which SGLang changes
            self._build(request, [each | {"meta_info": about | {"finish_reason": reason}}], 0)

    def _write(self, request: Any, answers: list[Any]) -> "Written | Any":
        """Return the answer in JSON, or SGLang's error response."""
        found = self._build(request, answers, int(time.time()))
        if not isinstance(found, BaseModel):
            return found
        choices: list[Any] = getattr(found, "choices", [])
        aborted = any(choice.finish_reason == "abort" for choice in choices)
        looped = any((each["meta_info"].get("finish_reason") or {}).get("looped") for each in answers)
        return Written(self._json(found, request, answers), aborted, looped)

    @abstractmethod
    def _build(self, request: Any, answers: list[Any], created: int) -> Any:
        """Return SGLang's response, or its error response."""

    def _json(self, found: BaseModel, request: Any, answers: list[Any]) -> bytes:
        return found.model_dump_json().encode()


class Chat(Serving, OpenAIServingChat):
    def _build(self, request: Any, answers: list[Any], created: int) -> Any:
        return self._build_chat_response(request, answers, created)

    def _process_response_logprobs(self, ret_item: Any) -> ChoiceLogprobs:
        return ChoiceLogprobs(content=[])  # `_json` puts them in

    def _json(self, found: BaseModel, request: Any, answers: list[Any]) -> bytes:
        body = super()._json(found, request, answers)
        return with_logprobs(body, list(map(logprobs_of, answers))) if request.logprobs else body


class Completion(Serving, OpenAIServingCompletion):
    def _build(self, request: Any, answers: list[Any], created: int) -> Any:
        return self._build_completion_response(request, answers, created)


def _logprobs(answers: list[Any]) -> int:
    """Return how many log probabilities the answers have."""
    names = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")
    parts = [each["meta_info"].get(name) or [] for each in answers for name in names]
    return sum(len(part) * (len(part[-1] or ()) if part else 0) for part in parts)


class TokenTexts:
    """Remembers the texts of tokens, each of which SGLang would decode again for each log probability."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(
        self, token_logprobs_val: Sequence[float], token_logprobs_idx: Sequence[int], decode_to_text: bool
    ) -> list[tuple[float, int, str | None]]:
        """Do what TokenizerManager.detokenize_logprob_tokens does."""
        known = self._texts
        if not decode_to_text:
            return [(value, each, None) for value, each in zip(token_logprobs_val, token_logprobs_idx, strict=False)]
        new = [each for each in dict.fromkeys(token_logprobs_idx) if each not in known]
        if new:
            known.update(zip(new, self._tokenizer.batch_decode([[each] for each in new]), strict=True))
        return [(value, each, known[each]) for value, each in zip(token_logprobs_val, token_logprobs_idx, strict=False)]


def beside_the_loop(manager: Any) -> None:
    """Let SGLang's tokenizer manager tokenize long texts in the thread, decode each token's text once, and tokenize a
    stop string once for all answers.
    """
    if manager.tokenizer is None:
        return
    manager.detokenize_logprob_tokens = TokenTexts(manager.tokenizer)
    manager.sampling_params_class = Sampling
    tokenize_ahead(manager)
