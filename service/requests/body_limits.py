"""Limits what a request may ask of an engine that other requests use at the same time.

Values beyond each limit were seen to hang SGLang's scheduler or its worker for all requests, to fill their memory, or
to be answered wrongly (docs/reliability.md). The bodies are as the client sent them.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from service.requests.schema_limits import schema_risk

MOST_CHOICES = 128
MOST_PROMPTS = 1000
MOST_VALUES = 100_000  # members and entries of a whole body
MOST_COPIED = 8 * 1024**2  # characters in the copies that the answers of one request have of its fields
MOST_ENTRIES = 128  # of a list that is neither a prompt nor its parts
SHORT_LISTS = ("cache_salt", "extra_key", "include", "custom_labels", "modalities", "functions")
MOST_TEXTS = 2048  # to embed, score or rank in one request
MOST_LOGPROBS = 100
MOST_LOGPROB_CELLS = 1_000_000
MOST_BIASES, MOST_BIASES_IN_ALL = 1024, 65_536  # of one answer, and over all answers of a request
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 1024
MOST_STOP_IDS = 1024
MOST_TOOLS = 128
MOST_PARTS = 4096  # messages of a chat, and parts of them
MOST_LABELS = 128
UNSAID_TOKENS = 32_768  # assumed for an answer if the request sets no maximum

# With these fields one line can stop an engine; BATCHWEAVE_ALLOW_PATTERNS lets them through.
PATTERNS = ("stop_regex", "regex", "ebnf")
_REFUSED = {
    "custom_logit_processor": "it is code that the engine would run",
    "lora_path": "'model' names the adapter, as in 'model:adapter'",
    "return_hidden_states": "hidden states are not returned",
    "return_routed_experts": "routed experts are not returned",
    "routed_experts_start_len": "routed experts are not returned",
    "input_embeds": "prompts must be text or token ids",
}
REFUSED = frozenset({*PATTERNS, *_REFUSED, "chat_template"})  # with a value; see PATTERNS
# Of these no answer has a copy, or its prompt is one of them.
_NOT_COPIED = frozenset(
    {"messages", "prompt", "input", "items", "documents", "query", "instructions", "tools", "chat_template_kwargs"}
    | {"input_ids"}
)
# Arguments for rendering the chat template; a request that sets these replaces the template or runs another.
_TEMPLATE_NAMES = frozenset(
    {"self", "chat_template", "tokenize", "tools", "messages", "conversation", "documents", "padding", "truncation"}
    | {"max_length", "tokenizer_kwargs", "continue_final_message", "add_generation_prompt"}
)
_OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class BodyFault(NamedTuple):
    """A field of the body, and why its value is refused."""

    param: str
    reason: str


def body_faults(body: dict[str, Any], allow_patterns: bool = False) -> Iterator[BodyFault]:
    """Yield every field that must not reach an engine; for `allow_patterns`, see PATTERNS."""
    if not allow_patterns:
        for name in PATTERNS:
            if body.get(name) is not None:
                yield BodyFault(name, "is not allowed: a pattern can stop the engine for all. Use response_format")
    for name, reason in _REFUSED.items():
        if body.get(name) not in (None, False, "", []):
            yield BodyFault(name, f"is not allowed: {reason}")
    yield from _values(body)
    yield from _counts(body)
    yield from _copied(body)
    yield from _stops(body)
    yield from _logits(body)
    yield from _biases(body)
    yield from _template(body)
    yield from _tools(body)
    yield from _formats(body, allow_patterns)


def _values(body: dict[str, Any]) -> Iterator[BodyFault]:
    """Yield the field with which a body has too many values: each that is of a wrong type would be an error of its own.

    Token ids do not count.
    """
    count = 0
    for name, given in body.items():
        left = [given]
        while left:
            value = left.pop()
            if isinstance(value, list) and set(map(type, value)) == {int}:
                continue
            if isinstance(value, list | dict):
                count += len(value)
                if count > MOST_VALUES:
                    yield BodyFault(name, f"has too many values: the body has more than {MOST_VALUES:,}")
                    return
                left += value.values() if isinstance(value, dict) else value


def _counts(body: dict[str, Any]) -> Iterator[BodyFault]:
    for name in ("n", "best_of"):
        if body.get(name) is not None and not _is_whole(body[name], 1, MOST_CHOICES):
            yield BodyFault(name, f"must be a whole number from 1 to {MOST_CHOICES}")
    if body.get("seed") is not None and not _is_whole(body["seed"], -(2**63), 2**63 - 1):
        yield BodyFault("seed", "must be a 64-bit integer")
    answers = choices(body)
    if answers > MOST_PROMPTS:
        yield BodyFault("prompt", f"asks for {answers} answers; at most {MOST_PROMPTS} are allowed in one request")
    labels = body.get("label_token_ids")
    if isinstance(labels, list) and len(labels) > MOST_LABELS:
        yield BodyFault("label_token_ids", f"has {len(labels)} ids; at most {MOST_LABELS} are allowed")
    for name in SHORT_LISTS:
        given = body.get(name)
        if isinstance(given, list | dict) and len(given) > MOST_ENTRIES:
            yield BodyFault(name, f"has {len(given)} entries; at most {MOST_ENTRIES} are allowed")
    for name in ("input", "items", "documents"):
        given = body.get(name)
        if isinstance(given, list) and len(given) > MOST_TEXTS and not isinstance(given[0], int):
            yield BodyFault(name, f"has {len(given)} parts; at most {MOST_TEXTS} are allowed in one request")


def choices(body: dict[str, Any]) -> int:
    """Return how many answers a request asks for, over all its prompts."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (int(body["n"]) if _is_whole(body.get("n"), 1, MOST_CHOICES) else 1)


def _copied(body: dict[str, Any]) -> Iterator[BodyFault]:
    """Yield the largest of the fields that are too large together where each answer, or each item, has a copy of them.

    The engine makes the copies in its event loop, and sends each to its scheduler.
    """
    items = max(len(body[name]) if isinstance(body.get(name), list) else 0 for name in ("items", "documents"))
    copies = max(choices(body), items)
    skipped = _NOT_COPIED - ({"query"} if items else set())
    sizes = {name: _characters(given) for name, given in body.items() if name not in skipped} if copies > 1 else {}
    if copies * sum(sizes.values()) > MOST_COPIED:
        name = max(sizes, key=lambda name: sizes[name])
        many = f"{sizes[name]:,} characters, of which {copies:,} answers have a copy each"
        yield BodyFault(name, f"has {many}; at most {MOST_COPIED:,} characters in all copies are allowed")


def _characters(value: Any) -> int:
    """Return about how many characters of JSON a value has."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        count += len(each) if isinstance(each, str) else 4
        if isinstance(each, dict):
            count += sum(map(len, each))
            left += each.values()
        elif isinstance(each, list):
            left += each
    return count


def _echoed(body: dict[str, Any]) -> int:
    """Return the most prompt tokens that an answer can echo: a token has at least one character."""
    prompt = body.get("prompt") if body.get("echo") else None
    given = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    return max(len(each) if isinstance(each, str | list) else 0 for each in given)


def _stops(body: dict[str, Any]) -> Iterator[BodyFault]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    if len(stops) > MOST_STOPS:
        yield BodyFault("stop", f"has {len(stops)} strings; at most {MOST_STOPS} are allowed")
    elif any(len(each) > MOST_STOP_CHARACTERS for each in stops if isinstance(each, str)):
        yield BodyFault("stop", f"has a string of more than {MOST_STOP_CHARACTERS} characters")
    ids = body.get("stop_token_ids")
    if isinstance(ids, list) and len(ids) > MOST_STOP_IDS:
        yield BodyFault("stop_token_ids", f"has {len(ids)} ids; at most {MOST_STOP_IDS} are allowed")


def _logits(body: dict[str, Any]) -> Iterator[BodyFault]:
    asked = {name: body[name] for name in _OUTPUT_FIELDS if body.get(name) is not None}
    for name, value in asked.items():
        if not _is_whole(value, 0, 2**31 - 1):
            yield BodyFault(name, f"must be a whole number from 0 to {2**31 - 1}")
    most = 0
    for name in ("logprobs", "top_logprobs"):
        value = body.get(name)
        if value is None or isinstance(value, bool):
            continue
        if not _is_whole(value, 0, MOST_LOGPROBS):
            yield BodyFault(name, f"must be a whole number from 0 to {MOST_LOGPROBS}")
        else:
            most = max(most, int(value))
    answers = max((int(value) for value in asked.values() if _is_whole(value, 0, 2**31 - 1)), default=UNSAID_TOKENS)
    tokens = (answers + _echoed(body)) * choices(body)
    if most * tokens > MOST_LOGPROB_CELLS:
        name = "top_logprobs" if body.get("top_logprobs") else "logprobs"
        yield BodyFault(name, f"asks for {most} for each of {tokens} tokens; at most {MOST_LOGPROB_CELLS:,} in total")


def _biases(body: dict[str, Any]) -> Iterator[BodyFault]:
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        if len(bias) > MOST_BIASES:
            yield BodyFault("logit_bias", f"has {len(bias)} tokens; at most {MOST_BIASES} are allowed")
        elif len(bias) * choices(body) > MOST_BIASES_IN_ALL:
            many = f"{len(bias)} tokens for each of {choices(body)} answers"
            yield BodyFault("logit_bias", f"has {many}; at most {MOST_BIASES_IN_ALL:,} are allowed in all")
        elif not all(re.fullmatch(r"0|[1-9][0-9]{0,9}", key) for key in bias):
            yield BodyFault("logit_bias", "has a key that is not a token id")


def _template(body: dict[str, Any]) -> Iterator[BodyFault]:
    given = body.get("chat_template_kwargs")
    if body.get("chat_template") is not None:
        yield BodyFault("chat_template", "is not allowed: the model's own template is used")
    if not isinstance(given, dict):
        return
    for name in given:
        if name in _TEMPLATE_NAMES or name.startswith("return_"):
            yield BodyFault("chat_template_kwargs", f"must not set {name[:64]!r}")


def _tools(body: dict[str, Any]) -> Iterator[BodyFault]:
    tools = body.get("tools")
    if isinstance(tools, list):
        if len(tools) > MOST_TOOLS:
            yield BodyFault("tools", f"has {len(tools)} tools; at most {MOST_TOOLS} are allowed")
        elif reason := schema_risk(tools):
            yield BodyFault("tools", reason)
    messages = body.get("messages")
    if _parts_in(messages) > MOST_PARTS:
        yield BodyFault("messages", f"has more than {MOST_PARTS} messages and parts")
    if isinstance(messages, list) and any(isinstance(each, dict) and each.get("tools") for each in messages):
        yield BodyFault("messages", "has tools in a message; put them in 'body.tools'")


def _parts_in(messages: Any) -> int:
    """Return the number of messages and parts of messages."""
    if not isinstance(messages, list):
        return 0
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    return len(messages) + sum(len(each) for each in contents if isinstance(each, list))


def _formats(body: dict[str, Any], allow_patterns: bool) -> Iterator[BodyFault]:
    wanted = body.get("response_format")
    if isinstance(wanted, dict):
        if wanted.get("type") == "structural_tag" and not allow_patterns:
            yield BodyFault("response_format", "must not be a structural tag, which contains patterns")
        elif reason := schema_risk(wanted):
            yield BodyFault("response_format", reason)
    text = body.get("text")
    of_text = text.get("format") if isinstance(text, dict) else None
    if isinstance(of_text, dict) and (reason := schema_risk(of_text)):
        yield BodyFault("text", reason)
    wanted = wanted or of_text
    is_free = wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text")
    is_bound = not is_free or body.get("tool_choice") not in (None, "auto", "none")
    if is_bound and body.get("min_tokens"):
        yield BodyFault("min_tokens", "cannot be used if response_format or tool_choice restricts the answer")
    schema = body.get("json_schema")
    if schema is not None:
        yield BodyFault("json_schema", "is not allowed: use response_format")


def _is_whole(value: Any, least: int, most: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == value and value == int(value) and least <= value <= most if abs(value) < 2**64 else False
