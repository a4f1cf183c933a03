"""Knows which parameters of a body SGLang 0.5.17 accepts. It ignores all others, such as a misspelt one, silently."""

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from service.requests.accept import EVERY_ANSWER, TURNS, Accept
from service.requests.asked_json import asked_json
from service.requests.body_limits import REFUSED
from service.requests.unenforced import unenforced

MOST_NAMES, MOST_CHARACTERS = 64, 64  # of what is remembered of a file
MOST_TOLD = 16
CLOSE = 0.8  # from 0 to 1, how similar a name must be to be what was meant


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAMPLING = _names(
    "cache_salt extra_key frequency_penalty min_p model presence_penalty priority repetition_penalty session_id stop "
    "stream temperature top_k top_p user"
)
# For those who run engines, not for those who write requests.
_INTERNAL = _names(
    "bootstrap_host bootstrap_port bootstrap_room custom_params data_parallel_rank disagg_prefill_dp_rank rid "
    "routed_dp_rank session_params"
)
_GENERATING = (
    _SAMPLING
    | _INTERNAL
    | _names(
        "custom_logit_processor ebnf ignore_eos images_config logit_bias logprobs lora_path max_tokens min_tokens n "
        "no_stop_trim regex response_format return_cached_tokens_details return_hidden_states return_routed_experts "
        "return_token_ids routed_experts_start_len seed skip_special_tokens stop_regex stop_token_ids stream_options"
    )
)
KNOWN = {
    "/v1/chat/completions": _GENERATING
    | _names(
        "audio chat_template_kwargs continue_final_message functions input_ids max_completion_tokens max_dynamic_patch "
        "messages min_dynamic_patch modalities parallel_tool_calls reasoning reasoning_effort return_meta_info "
        "return_prompt_token_ids separate_reasoning stream_reasoning task tool_choice tools top_logprobs "
        "use_audio_in_video web_search_options"
    ),
    "/v1/completions": _GENERATING | _names("best_of custom_labels echo json_schema prompt suffix"),
    "/v1/responses": _SAMPLING
    | _names(
        "background conversation include input instructions max_output_tokens max_tool_calls metadata "
        "parallel_tool_calls previous_response_id prompt reasoning request_id service_tier store text tool_choice "
        "tools top_logprobs truncation"
    ),
    "/v1/embeddings": _names(
        "dimensions embed_override_token_id embed_overrides encoding_format input lora_path model priority rid user"
    ),
    "/v1/score": _names(
        "apply_softmax embed_override_token_id item_embed_overrides item_first items label_token_ids model query "
        "query_embed_overrides return_pooled_hidden_states"
    ),
    "/v1/rerank": _names("documents instruct model query return_documents top_n"),
}


LAST = "the model's worker that started last"
THOUGHTS = "accept.thinking_tokens"


def noticed(endpoint: str) -> frozenset[str]:
    """Return the parameters that are not ignored: an engine knows them, or this service refuses them."""
    return KNOWN[endpoint] | REFUSED


def without_effect(
    endpoint: str, body: dict[str, Any], keeps_seeds: bool, finds_calls: bool
) -> Iterator[tuple[str, str]]:
    """Yield the parameters that SGLang reads, and that do not do what they say, each with the reason.

    `keeps_seeds`: whether the engine's inference is deterministic. `finds_calls`: whether it finds tool calls.
    """
    chat, generates = endpoint == "/v1/chat/completions", endpoint in ("/v1/chat/completions", "/v1/completions")
    if generates and body.get("seed") is not None and not keeps_seeds:
        yield "seed", "the engine has no deterministic inference"
    if endpoint == "/v1/completions" and body.get("best_of") not in (None, 1, body.get("n")):
        yield "best_of", "all answers of n are returned"
    if endpoint == "/v1/completions" and body.get("suffix"):
        yield "suffix", "text is only added at the end"
    if chat and body.get("top_logprobs") and not body.get("logprobs"):
        yield "top_logprobs", "it needs logprobs: true"
    if endpoint == "/v1/responses" and (body.get("top_logprobs") or "message.output_text.logprobs" in _included(body)):
        yield "top_logprobs", "this endpoint returns no log probabilities; /v1/chat/completions does"
    if endpoint == "/v1/responses" and body.get("store"):
        yield "store", "responses are not kept on their own"
    if endpoint == "/v1/responses" and body.get("truncation") == "auto":
        yield "truncation", "what is too long is refused"
    calls = endpoint in ("/v1/chat/completions", "/v1/responses")
    if calls and body.get("tools") and body.get("tool_choice") != "none" and not finds_calls:
        yield "tools", f"{LAST} finds no tool calls in answers (BATCHWEAVE_TOOL_PARSER)"


def _included(body: dict[str, Any]) -> list[Any]:
    given = body.get("include")
    return given if isinstance(given, list) else []


def _grammars(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that bind an answer, each with the parameter that has it."""
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and isinstance(given := wanted.get("json_schema"), dict):
        yield "response_format", given.get("schema")
    text = body.get("text")
    if isinstance(text, dict) and isinstance(given := text.get("format"), dict):
        yield "text.format", given.get("schema")
    tools, is_forced = body.get("tools"), body.get("tool_choice") not in (None, "none", "auto")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and (function.get("strict") or is_forced):
            yield "tools", function.get("parameters")


class Unknown:
    """Counts the lines of a file that have parameters which are ignored, by their names.

    `finds_calls` and `finds_thoughts`, which may be set once the model is known: whether its workers find tool calls
    and thoughts in answers.
    """

    def __init__(self, endpoint: str, keeps_seeds: bool = False) -> None:
        self.finds_calls = self.finds_thoughts = True
        self._endpoint, self._keeps_seeds = endpoint, keeps_seeds
        self._why: dict[str, str] = {}  # by the name of a parameter that has no effect
        self._noticed = noticed(endpoint)
        self._meant = sorted(KNOWN[endpoint] - REFUSED - _INTERNAL)
        self._lines = Counter[str]()
        self._last: tuple[list[tuple[str, Any]], dict[str, str]] = [], {}  # most lines have the schema of the last

    def count(self, body: dict[str, Any], accept: Accept = EVERY_ANSWER) -> None:
        """Count the line with this body; of the whole file, no more than MOST_NAMES names."""
        idle = dict(without_effect(self._endpoint, body, self._keeps_seeds, False)) | self._unenforced(body)
        if accept.schema and asked_json(body) is None:
            idle["accept.schema"] = "it binds only answers to requests that ask for JSON, such as by response_format"
        if accept.explain and (self._endpoint not in TURNS or body.get("n") not in (None, 1) or "input_ids" in body):
            idle["accept.explain"] = "only chats and responses with one choice can be told what was wrong"
        if accept.thinking_tokens is not None:
            idle[THOUGHTS] = f"{LAST} finds no thoughts in answers (BATCHWEAVE_REASONING_PARSER)"
        self._why |= idle
        unknown = (name[:MOST_CHARACTERS] for name in body if name not in self._noticed)
        for name in dict.fromkeys([*idle, *unknown]):
            if name in self._lines or len(self._lines) < MOST_NAMES:
                self._lines[name] += 1

    def _unenforced(self, body: dict[str, Any]) -> dict[str, str]:
        grammars = list(_grammars(body))
        if grammars != self._last[0]:
            found = {f"{name}.{each}": why for name, schema in grammars for each, why in unenforced(schema).items()}
            self._last = grammars, found
        return self._last[1]

    def shapes(self) -> list[dict[str, Any]]:
        """Return up to MOST_TOLD names, each with its number of lines and the most similar known name, or the reason.

        Those that are similar to a known one or have no effect come first, then the most frequent ones.
        """
        has_effect = {"tools"} if self.finds_calls and "tools" in self._noticed else set[str]()
        has_effect |= {THOUGHTS} if self.finds_thoughts else set()
        found = [
            {
                "name": name if name.isprintable() else repr(name)[1:-1],
                "lines": lines,
                "similar": None if name in self._why else self._similar(name),
                **({"why": self._why[name]} if name in self._why else {}),
            }
            for name, lines in self._lines.most_common()
            if name not in has_effect
        ]
        return sorted(found, key=lambda each: each["similar"] is None and "why" not in each)[:MOST_TOLD]

    def _similar(self, name: str) -> str | None:
        return next(iter(get_close_matches(name, self._meant, 1, CLOSE)), None)
