"""Limits what a request may ask of an engine that other requests use at the same time.

Values beyond each limit were seen to hang SGLang's scheduler or its worker for all requests, to fill their memory, or
to be answered wrongly (docs/reliability.md). The bodies are as the client sent them.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from service.requests.patterns import risk
from service.requests.schema_roles import Role

MOST_CHOICES = 128
MOST_PROMPTS = 1000
MOST_VALUES = 100_000  # members and entries of a whole body
MOST_ENTRIES = 128  # of a list that is neither a prompt nor its parts
SHORT_LISTS = ("cache_salt", "extra_key", "include", "custom_labels", "modalities", "functions")
MOST_TEXTS = 2048  # to embed, score or rank in one request
MOST_LOGPROBS = 100
MOST_LOGPROB_CELLS = 1_000_000
MOST_BIASES = 1024
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 1024
MOST_STOP_IDS = 1024
MOST_TOOLS = 128
MOST_PARTS = 4096  # messages of a chat, and parts of them
SCHEMA_CHARACTERS = 64 * 1024
SCHEMA_DEPTH = 128  # levels of the JSON, two for each level of the schema
MOST_ENUM = 1000
MOST_PROPERTIES = 256
MOST_COUNTED_PROPERTIES = 64  # of an object with minProperties or maxProperties
MOST_SCHEMAS = 1000  # in a schema, true and false among them; the check of each takes 0.2 ms
MOST_NUMBERS = 32  # numbers with bounds
MOST_LENGTHS = 32  # patterns and bounds of lengths
MOST_DIFFERENT_LENGTHS = 8  # of these; each different one takes seconds to compile
MOST_WAYS = 256  # choices and references
MOST_LABELS = 128
UNSAID_TOKENS = 32_768  # assumed for an answer if the request sets no maximum
MOST_TYPES = 8

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
# Arguments for rendering the chat template; a request that sets these replaces the template or runs another.
_TEMPLATE_NAMES = frozenset(
    {"chat_template", "tokenize", "tools", "messages", "conversation", "documents", "padding", "truncation"}
    | {"max_length", "tokenizer_kwargs", "continue_final_message", "add_generation_prompt"}
)
TO_DEFINITION = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
_CHOICES = ("anyOf", "oneOf", "allOf")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LENGTHS = {"pattern": str, "minLength": int, "maxLength": int}
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
    yield from _stops(body)
    yield from _logits(body)
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
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        if len(bias) > MOST_BIASES:
            yield BodyFault("logit_bias", f"has {len(bias)} tokens; at most {MOST_BIASES} are allowed")
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


def schema_risk(schema: Any, has_data: bool = True) -> str | None:
    """Return why a JSON schema is refused, or None: its grammar would take minutes, gigabytes, or seconds per token.

    `has_data`: examples and the like are no schemas. Where a reference may lead to one, all is judged as if it were.
    """
    depth, left = 0, [(schema, 1, Role.SCHEMA)]
    counts: dict[str, int] = dict.fromkeys(("characters", "schemas", "properties", "numbers", "lengths", "ways"), 0)
    different = set[Any]()
    while left:
        value, at, role = left.pop()
        depth = max(depth, at)
        if depth > SCHEMA_DEPTH:
            return f"has a schema whose JSON is nested more than {SCHEMA_DEPTH} levels deep"
        if isinstance(value, dict):
            if has_data and _leads_elsewhere(value.get("$ref")):
                return schema_risk(schema, has_data=False)
            if role is Role.SCHEMA and (reason := _object_risk(value, counts, different)):
                return reason
            counts["schemas"] += role is Role.SCHEMA
            counts["characters"] += sum(map(len, value)) + 4 * len(value)
            left += [(each, at + 1, role.of(name) if has_data else role) for name, each in value.items()]
        elif role is Role.MAP:
            return "has a schema whose properties or definitions are no object"
        elif isinstance(value, list):
            kinds = set(map(type, value))
            if role is Role.SCHEMA and kinds - {str} and kinds - {dict, bool}:
                counts["schemas"] += len(value)  # which jsonschema compares each with each
            counts["characters"] += 2 * len(value)
            left += [(each, at + 1, role) for each in value[:SCHEMA_CHARACTERS]]
        else:
            counts["schemas"] += role is Role.SCHEMA and isinstance(value, bool)
            counts["characters"] += len(value) if isinstance(value, str) else 8
        if counts["characters"] > SCHEMA_CHARACTERS:
            return f"has a schema larger than {SCHEMA_CHARACTERS // 1024} KiB"
    return _too_many(counts)


def _too_many(counts: dict[str, int]) -> str | None:
    for name, about, most in (
        ("schemas", "schemas in it", MOST_SCHEMAS),
        ("properties", "properties", MOST_PROPERTIES),
        ("numbers", "numbers with bounds", MOST_NUMBERS),
        ("ways", "choices and references", MOST_WAYS),
    ):
        if counts[name] > most:
            return f"has a schema with {counts[name]} {about}; at most {most} are allowed"
    return None


def _leads_elsewhere(ref: Any) -> bool:
    """Return whether a reference leads to anything but a definition, such as to data or to a map of definitions."""
    return isinstance(ref, str) and not TO_DEFINITION.fullmatch(ref)


def _object_risk(value: dict[str, Any], counts: dict[str, int], different: set[Any]) -> str | None:
    """Return why one object of a schema is refused, or None.

    Adds to the `counts` of the whole schema, and to its `different` lengths and patterns.
    """
    properties, enum, kind = value.get("properties"), value.get("enum"), value.get("type")
    counts["properties"] += len(properties) if isinstance(properties, dict) else 0
    counts["numbers"] += any(isinstance(value.get(name), int | float) for name in _NUMBERS)
    counts["lengths"] += sum(isinstance(value.get(name), kind) for name, kind in _LENGTHS.items())
    named = value.get("patternProperties")
    counts["lengths"] += len(named) if isinstance(named, dict) else 0
    counts["lengths"] += isinstance(value.get("format"), str)
    if counts["lengths"] > MOST_LENGTHS:  # checked before the patterns are parsed
        return f"has a schema with more than {MOST_LENGTHS} patterns and length bounds"
    counts["ways"] += isinstance(value.get("$ref"), str)
    counts["ways"] += sum(len(value[each]) for each in _CHOICES if isinstance(value.get(each), list))
    if any(isinstance(value.get(each), int) for each in ("minLength", "maxLength")):
        different.add((str(value.get("minLength")), str(value.get("maxLength"))))
    texts = (value.get("pattern"), value.get("format"), *(named if isinstance(named, dict) else ()))
    different.update(each for each in texts if each and isinstance(each, str))
    if len(different) > MOST_DIFFERENT_LENGTHS:
        return f"has a schema with more than {MOST_DIFFERENT_LENGTHS} different patterns and length bounds"
    counted = any(value.get(each) is not None for each in ("minProperties", "maxProperties"))
    if counted and isinstance(properties, dict) and len(properties) > MOST_COUNTED_PROPERTIES:
        return f"has an object with minProperties or maxProperties and more than {MOST_COUNTED_PROPERTIES} properties"
    if empty := [each for each in ("enum", "type", *_CHOICES) if value.get(each) == []]:
        return f"has an empty '{empty[0]}', so that no answer can meet it"
    if isinstance(enum, list) and len(enum) > MOST_ENUM:
        return f"has an enum with {len(enum)} values; at most {MOST_ENUM} are allowed"
    if isinstance(kind, list) and (len(kind) > MOST_TYPES or not all(isinstance(each, str) for each in kind)):
        return f"has a 'type' that is neither a name nor a list of at most {MOST_TYPES} names"
    patterns = [value.get("pattern"), *(named if isinstance(named, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and (reason := risk(pattern)):
            return f"has the pattern {pattern[:64]!r}, which is not allowed: {reason}"
    return None


def _is_whole(value: Any, least: int, most: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == value and value == int(value) and least <= value <= most if abs(value) < 2**64 else False
