"""Serves embeddings, score, rerank and responses through SGLang, with the checks that SGLang does not make itself.

Every refused request was seen to kill, hang or mislead a real engine, or would leave state that a batch must not leave.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeGuard

from pydantic import BaseModel, Field, model_validator
from sglang.srt.entrypoints.openai import serving_rerank
from sglang.srt.entrypoints.openai.protocol import (
    EmbeddingRequest,
    ResponsesRequest,
    ScoringRequest,
    V1RerankReqInput,
)
from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
from sglang.srt.entrypoints.openai.serving_rerank import OpenAIServingRerank
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore

from engine_ext.plugin.worker.answers import Answer
from engine_ext.plugin.worker.aside import LARGE, aside
from engine_ext.plugin.worker.marked import ONLINE, MarkedManager, Told, told
from engine_ext.plugin.worker.response_events import response_events
from engine_ext.plugin.worker.text_size import MOST_TOKEN_BYTES, text_size

# It logs what clients got wrong with a traceback, which may quote an answer; the caller says what failed.
logging.getLogger("sglang.srt.entrypoints.openai.serving_responses").setLevel(logging.CRITICAL)

Fault = tuple[str, str]  # the field, and why it is refused
# These fields replace tokens with vectors, whose results stay in the KV cache under those tokens.
OVERRIDES = ("embed_override_token_id", "embed_overrides", "query_embed_overrides", "item_embed_overrides")
MOST_JOINED = 8 * 1024 * 1024  # characters, or token ids, of a query with all that it is joined with
MOST_NUMBERS = 2_500_000  # of the embeddings of a request, some 50 MB of JSON: 2,048 texts of 1,024 numbers
MANY_NUMBERS = 20_000  # that take some 20 ms to write
SPARE_TOKENS = 8  # tokens that a tokenizer may add to a text


class _Format(BaseModel):
    """How a response's text must look. SGLang knows this only of chats."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "_Format":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("text.format.schema is missing")
        return self


class _Text(BaseModel):
    format: _Format | None = None
    verbosity: str | None = None


class _Responses(ResponsesRequest):
    # SGLang's types lack what its own answers contain.
    input: str | list[dict[str, Any]]  # pyright: ignore[reportIncompatibleVariableOverride]
    text: _Text | None = None

    def to_sampling_params(
        self,
        default_max_tokens: int,
        default_params: dict[str, Any] | None = None,
        stop: Any = None,
        tool_call_constraint: Any = None,
    ) -> dict[str, Any]:
        wanted = self.text.format if self.text is not None else None
        is_bound = wanted is not None and wanted.type != "text"
        if is_bound and self.tools and self.tool_choice != "none":
            raise ValueError(
                "text.format would keep the answer from being a call: set tool_choice to none, or no tools"
            )
        parameters = super().to_sampling_params(default_max_tokens, default_params, stop, tool_call_constraint)
        if is_bound and wanted is not None:
            parameters["json_schema"] = json.dumps(wanted.schema_ or {"type": "object"})
        if self.max_output_tokens is not None:
            parameters["max_new_tokens"] += 2  # SGLang 0.5.17 subtracts two from the requested number
        return parameters


class _Responding(OpenAIServingResponses):
    async def _make_request(self, request: Any, prev_response: Any, tokenizer: Any) -> Any:
        make = partial(super()._make_request, request, prev_response, tokenizer)
        given = {"input": request.input, "instructions": request.instructions}
        if text_size("/v1/responses", given).total <= LARGE:
            return await make()
        return await aside(lambda: asyncio.run(make()), True)


@dataclass(frozen=True, slots=True)
class Served:
    """One endpoint: the model of its body, the check for faults, the function that answers, and the answer's writer.

    `events`: makes server-sent events of what `ask` returns for a stream, where the endpoint has such.
    """

    request_type: type[BaseModel]
    fault: Callable[[Any], Fault | None]
    ask: Callable[[Any, Told], Awaitable[Any]]
    write: Callable[[Any, Told], dict[str, Any] | bytes]
    events: "Callable[[Any, Told], AsyncGenerator[Answer | bytes, None]] | None" = None


class Endpoints:
    """The endpoints, other than completions, that the engine's model can serve."""

    def __init__(self, manager: Any, templates: Any, model_name: str) -> None:
        self._manager = MarkedManager(manager)
        self._model_name = model_name
        self._vocab_size = int(manager.model_config.vocab_size)
        self._generates = bool(manager.is_generation)
        architectures = manager.model_config.hf_config.architectures or []
        classifies = any("Classification" in each for each in architectures)
        template = getattr(manager.tokenizer, "chat_template", None)
        reranks = isinstance(template, str) and 'answer can only be "yes" or "no"' in template
        marked: Any = self._manager
        self.served: dict[str, Served] = {}
        if self._generates:
            responses = _Responding(marked, templates, enable_prompt_tokens_details=True)
            self.served["/v1/responses"] = Served(
                _Responses,
                self._responses_fault,
                self._asker(responses.create_responses),
                self._write_response,
                self._response_events,
            )
        else:
            embedding = OpenAIServingEmbedding(marked, templates)
            self.served["/v1/embeddings"] = Served(
                EmbeddingRequest, self._embedding_fault, self._asker(embedding.handle_request), self._write_embeddings
            )
        if self._generates or classifies:
            score = OpenAIServingScore(marked)
            self.served["/v1/score"] = Served(
                ScoringRequest, self._score_fault, self._asker(score.handle_request), self._write
            )
        if classifies or (self._generates and reranks):
            _rerank._get_jinja_env = _environment
            rerank = OpenAIServingRerank(marked, templates)
            self.served["/v1/rerank"] = Served(
                V1RerankReqInput, self._rerank_fault, self._asker(rerank.handle_request), self._write_rerank
            )

    @staticmethod
    def _asker(serve: Callable[..., Awaitable[Any]]) -> Callable[[Any, Told], Awaitable[Any]]:
        async def ask(request: Any, known: Told) -> Any:
            if isinstance(request, _Responses):
                request.request_id = known.rid
                request.store = request.background = False  # SGLang never removes what it stores
                known.text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else None
            before = told.set(known)
            try:
                return await serve(request, None)
            finally:
                told.reset(before)

        return ask

    def _embedding_fault(self, request: Any) -> Fault | None:
        given = request.input
        items = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if not all(isinstance(item, str) or _is_ids(item) for item in items):
            return "input", "must be text or token ids"  # parts may name files and hosts, and their length is unchecked
        size = request.dimensions or int(self._manager.model_config.hidden_size)
        if len(items) * size > MOST_NUMBERS:
            return "input", f"has {len(items)} texts of {size} numbers each; at most {MOST_NUMBERS:,} numbers in all"
        return _overridden(request) or self._prompts_fault("input", items)

    def _score_fault(self, request: Any) -> Fault | None:
        items = request.items if isinstance(request.items, list) else [request.items]
        if self._generates and not request.label_token_ids:
            return "label_token_ids", "must name at least one token to compare"
        if len(request.query) * len(items) > MOST_JOINED:
            return "items", f"the query and all items joined with it have more than {MOST_JOINED} characters"
        # SGLang joins the query with each item.
        pairs = [_joined(request.query, each) for each in items]
        return _overridden(request) or self._prompts_fault("items", [request.query, *items, *pairs])

    def _rerank_fault(self, request: Any) -> Fault | None:
        for name, items in (("query", [request.query]), ("documents", request.documents)):
            if not all(isinstance(each, str) for each in items):
                return name, "must be text"
        if len(request.query) * len(request.documents) > MOST_JOINED:
            return "documents", f"the query and all documents joined with it have more than {MOST_JOINED} characters"
        longest = max(request.documents, key=len, default="")
        return self._prompts_fault("documents", [f"{request.query}{longest}"] if longest else [])

    def _responses_fault(self, request: Any) -> Fault | None:
        if not request.input:
            return "input", "must not be empty"
        if isinstance(request.input, list) and all(map(_is_reasoning, request.input)):
            return "input", "has reasoning alone; a message must come with it"  # SGLang may drop all of it
        return None

    def _prompts_fault(self, name: str, items: Iterable[Any]) -> Fault | None:
        """Check prompts of text or token ids: an embedding engine dies of some ids, and hangs on long prompts."""
        longest = int(self._manager.max_req_input_len)
        for item in items:
            if isinstance(item, str):
                tokens = len(item.encode()) + SPARE_TOKENS  # a token has at least one byte
                if longest <= tokens < MOST_TOKEN_BYTES * longest:  # a longer text has too many tokens in any case
                    tokens = len(self._manager.tokenizer.encode(item))
            elif _is_ids(item):
                if not item:
                    return name, "must not be an empty list of token ids"
                if not all(0 <= each < self._vocab_size for each in item):
                    return name, "a token id is outside the model's vocabulary"
                tokens = len(item)
            else:
                continue  # parts and the like, which SGLang's own models check
            if tokens >= longest:
                return name, f"the prompt has {tokens} tokens; the engine accepts fewer than {longest}"
        return None

    def _write(self, found: Any, _known: Told) -> dict[str, Any]:
        return {**_plain(found), "model": self._model_name}

    def _write_embeddings(self, found: Any, _known: Told) -> bytes:
        """Return the answer in JSON, written in parts: as a whole it would keep the interpreter for seconds."""
        about = found.model_dump(exclude={"data"}) | {"model": self._model_name}
        rows = b",".join(each.model_dump_json().encode() for each in found.data)
        return b'{"data":[' + rows + b"]," + json.dumps(about).encode()[1:]

    def _write_rerank(self, found: Any, known: Told) -> dict[str, Any]:
        """Return SGLang's list inside an object with model and usage, without ids and times of internal requests."""
        results = [{key: value for key, value in _plain(each).items() if key != "meta_info"} for each in found]
        usage = {"prompt_tokens": known.prompt_tokens, "total_tokens": known.prompt_tokens}
        return {"object": "rerank", "model": self._model_name, "results": results, "usage": usage}

    def _write_response(self, found: Any, known: Told) -> dict[str, Any]:
        """Return the response with usage in this endpoint's terms; it is incomplete if the length limit ended it."""
        body = _plain(found)
        usage: dict[str, Any] = body.get("usage") or {}
        output = usage.get("completion_tokens") or 0
        body["usage"] = {
            "input_tokens": usage.get("prompt_tokens") or 0,
            "input_tokens_details": {"cached_tokens": known.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens") or 0},
            "total_tokens": (usage.get("prompt_tokens") or 0) + output,
        }
        return self._complete(body, known)

    def _complete(self, body: dict[str, Any], known: Told) -> dict[str, Any]:
        """Return a response with what SGLang does not know of it."""
        body["model"] = self._model_name
        if usage := body.get("usage"):  # newer clients ask for it; what a cache keeps costs nothing here
            usage.setdefault("input_tokens_details", {}).setdefault("cache_write_tokens", 0)
        if known.text is not None:
            body["text"] = {"format": {"type": "text"}, **known.text}
        if known.kind == ONLINE:
            body["service_tier"] = known.slo
        if known.stopped_by_length:
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return body

    def _response_events(self, found: Any, known: Told) -> "AsyncGenerator[Answer | bytes, None]":
        return response_events(found, known, lambda body: self._complete(body, known))


def _is_reasoning(item: Any) -> bool:
    return (item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) == "reasoning"


def is_long(found: Any) -> bool:
    """Return whether an answer has so many numbers that writing it would hold others up."""
    rows = getattr(found, "data", None) or getattr(found, "scores", None) or []
    each = (getattr(row, "embedding", row) for row in rows)
    return sum(len(row) for row in each if isinstance(row, list | str)) > MANY_NUMBERS


_rerank: Any = serving_rerank
_make_environment = _rerank._get_jinja_env


@lru_cache(1)
def _environment() -> Any:
    """Return what renders a reranker's prompts; SGLang makes it, and compiles the template, for each document."""
    found: Any = _make_environment()
    found.from_string = lru_cache(8)(found.from_string)
    return found


def _plain(found: Any) -> dict[str, Any]:
    """Return SGLang's answer, a model or a finished JSON response, as plain JSON values."""
    text = found.model_dump_json() if isinstance(found, BaseModel) else bytes(found.body)
    return json.loads(text)


def _overridden(request: Any) -> Fault | None:
    return next(((name, "not supported") for name in OVERRIDES if getattr(request, name, None) is not None), None)


def _is_ids(item: Any) -> TypeGuard[list[int]]:
    return isinstance(item, list) and all(isinstance(each, int) for each in item)


def _joined(query: Any, item: Any) -> Any:
    """Return both as one prompt, of text or of token ids, or None for a pair that SGLang refuses."""
    of_one_kind = type(query) is type(item) and isinstance(query, str | list)
    return query + item if of_one_kind else None
