"""What one request may ask of an engine that others use too: each value here was seen to hang or fill it."""

from typing import Any

import pytest

from service.requests.body_limits import body_faults
from service.requests.patterns import risk
from service.requests.schema_limits import MOST_ENUM

UNSORTED = [[f"{k}"] for k in range(2000)]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def formatted(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop_regex": "(?s)(?:(?:(?:.)+)+)+\\x00"}, "stop_regex"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "s ::= s s | [a-z]"}, "ebnf"),
        ({"custom_logit_processor": "gASV"}, "custom_logit_processor"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        (
            {"chat_template_kwargs": {"chat_template": "{% for i in range(99999) %}{% endfor %}"}},
            "chat_template_kwargs",
        ),
        ({"n": 10_000}, "n"),
        ({"n": "10000"}, "n"),
        ({"n": -3}, "n"),
        ({"best_of": 10_000}, "best_of"),
        ({"n": 100, "prompt": ["x"] * 11}, "prompt"),
        ({"prompt": ["x"] * 10_000}, "prompt"),
        ({"prompt": ["x"] * 1000, "stop": ["s" * 1024] * 16}, "stop"),
        ({"prompt": [[5]] * 1000, "stop": ["s" * 1024] * 16}, "stop"),
        ({"prompt": ["x"] * 50, "user": "u" * 1_000_000}, "user"),
        ({"n": 128, "cache_salt": "u" * 100_000, "stop": "x"}, "cache_salt"),
        ({"n": 128, "x": {"k" * 100_000: 1}}, "x"),
        ({"query": "q" * 100_000, "documents": ["d"] * 100}, "query"),
        ({"query": "q", "instruct": "i" * 100_000, "documents": ["d"] * 100}, "instruct"),
        ({"query": "q" * 100_000, "items": ["d"] * 100}, "query"),
        ({"prompt": ["x"] * 1000, "logit_bias": {str(n): 1 for n in range(100)}}, "logit_bias"),
        ({"input": ["x"] * 10_000}, "input"),
        ({"top_logprobs": 4096}, "top_logprobs"),
        ({"logprobs": 100, "max_tokens": 100_000}, "logprobs"),
        ({"top_logprobs": 100, "max_tokens": 3000, "n": 32}, "top_logprobs"),
        ({"top_logprobs": 100, "max_tokens": 3000, "max_completion_tokens": 1, "prompt": ["x"] * 30}, "top_logprobs"),
        ({"top_logprobs": 100}, "top_logprobs"),
        ({"logprobs": 1, "echo": True, "prompt": "x" * 2_000_000, "max_tokens": 1}, "logprobs"),
        ({"max_tokens": "3000"}, "max_tokens"),
        ({"label_token_ids": [0] * 1000}, "label_token_ids"),
        ({**formatted({"const": 1}), "min_tokens": 16}, "min_tokens"),
        ({"tool_choice": "required", "min_tokens": 1}, "min_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
        (
            formatted({"properties": {f"p{n}": {"type": "string", "format": "uri"} for n in range(40)}}),
            "response_format",
        ),
        (formatted([0] * 1_000_000), "response_format"),
        ({"tools": [{"function": {"name": "f", "parameters": {"prefixItems": [{}] * 8000}}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"prefixItems": [True] * 6000}}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"dependencies": {"a": [0, *UNSORTED]}}}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"required": ["a", 0] * 600}}}]}, "tools"),
        ({"logit_bias": {str(n): 1 for n in range(4096)}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": "x" * 1_000_000}, "stop"),
        ({"stop_token_ids": list(range(5000))}, "stop_token_ids"),
        ({"cache_salt": [""] * 200_000}, "cache_salt"),
        ({"prompt": [1] * 50 + [""] * 200_000}, "prompt"),
        ({"input": [["", ""]] * 60_000}, "input"),
        ({"chat_template_kwargs": {"x": [""] * 200_000}}, "chat_template_kwargs"),
        (formatted({"not": {"$ref": "#/$defs/0"}, "$defs": [{"pattern": "^(a|a)*b$"}]}), "response_format"),
        ({"include": ["x"] * 200_000}, "include"),
        ({"seed": 2**70}, "seed"),
        ({"tools": [{}] * 10_000}, "tools"),
        ({"tools": [{"function": {"parameters": {"type": [{"a": n} for n in range(3000)]}}}]}, "tools"),
        ({"messages": [{"role": "system", "content": "x", "tools": [{}]}]}, "messages"),
        (formatted(nested(100)), "response_format"),
        (formatted({"enum": [str(n) for n in range(MOST_ENUM + 1)]}), "response_format"),
        *((formatted({"properties": {"a": {name: []}}}), "response_format") for name in ("enum", "anyOf", "type")),
        (formatted({"type": "string", "description": "x" * 100_000}), "response_format"),
        (formatted({"type": "string", "pattern": "^(.*)*$"}), "response_format"),
        (formatted({"anyOf": [{"type": "string", "maxLength": n} for n in range(30)]}), "response_format"),
        (formatted({"properties": {f"p{n}": {"maxLength": 100 + n} for n in range(9)}}), "response_format"),
        (formatted({"patternProperties": {f"^{'a' * n}$": {} for n in range(1, 40)}}), "response_format"),
        (formatted({"properties": {f"p{n}": {} for n in range(300)}}), "response_format"),
        (formatted({"properties": {f"p{n}": {} for n in range(70)}, "minProperties": 40}), "response_format"),
        (formatted({"$defs": {f"a{n}": {"anyOf": [{"$ref": "#"}] * 3} for n in range(50)}}), "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
    ],
)
def test_what_could_stop_an_engine_is_refused_by_its_field(body: dict[str, Any], param: str) -> None:
    assert param in {fault.param for fault in body_faults(body)}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {
            "n": 4,
            "stop": ["\n\n", "END"],
            "seed": 7,
            "logit_bias": {"50256": -100},
            "top_logprobs": 20,
            "max_tokens": 4000,
        },
        {"n": 2.0, "logprobs": True, "prompt": [1, 2, 3] * 1000},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": ["x"] * 1000, "input": list(range(8000)), "tools": [{"function": {"parameters": nested(3)}}]},
        formatted(nested(20)),
        formatted({"type": "object", "properties": {"pattern": {"type": "string"}, "enum": {"enum": ["a", "b"]}}}),
        formatted({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}),
        formatted({"properties": {f"p{n}": {"type": "string", "maxLength": 200} for n in range(30)}}),
        {"prompt": [list(range(120))] * 1000},
        {"input": list(range(200_000))},
        {"prompt": ["x"] * 1000, "stop": ["\n\n", "###"], "logit_bias": {"50256": -100}, "user": "u" * 64},
        {"prompt": ["x" * 4000] * 1000, "max_tokens": 1},
        {"n": 100, "messages": [{"role": "user", "content": "x" * 1_000_000}], **formatted({"enum": ["e" * 60_000]})},
        {"query": "q" * 5000, "documents": ["d" * 4000] * 1000},
    ],
)
def test_what_people_send_passes(body: dict[str, Any]) -> None:
    assert list(body_faults(body)) == []


def test_the_brave_may_let_patterns_through() -> None:
    body = {"stop_regex": "a+", "regex": "b", "ebnf": "root ::= 'x'", "custom_logit_processor": "gASV"}
    assert [fault.param for fault in body_faults(body, allow_patterns=True)] == ["custom_logit_processor"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("^(.*)*$", r"^(\w+\s?)*$", r"^(\w+ ?)+$", "([a-z]+)+", "(.+)+", "((((a+)+)+)+)", "(?:a+|b)*"),
        *("^((.|..|...)?(.|..)?)*$", "^(.?.?)*$", "^((.|..|...)?)*$", "(a|aa)*", "(a*)*", "(.?a)*"),
        *("[^a]{0,200}[^b]{0,200}",),
        *("(.*a|.*b|.*c)*", "a{1000}", "(a{20}){20}", "a" * 300, "(", "(?=a+)" * 9, "a{99999999999}"),
    ],
)
def test_a_pattern_whose_rounds_cannot_be_told_apart_is_refused(pattern: str) -> None:
    assert risk(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("^[a-z]+(-[a-z]+)*$", r"^(\d+\.)*\d+$", r"^[^@]+@[^@]+\.[a-z]{2,10}$", "[A-Z]{2}[0-9]{2}", "", "^(yes|no)$"),
        *("(a|b)*c", "(foo|ba)*", "(a?b)*", "(ab|a)*", "(a{2})*", "(x(a|ab)y)*", r"(\w+\s)+"),
        *(r"^#[0-9a-fA-F]{6}$", r"^\+?[0-9 ]{6,20}$", "(ab)*", r"^/([a-z0-9]+/)*$"),
    ],
)
def test_a_pattern_whose_rounds_are_marked_passes(pattern: str) -> None:
    assert risk(pattern) is None


STRING = {"type": "string"}
FORMATS: list[Any] = [{"format": f"f{n}"} for n in range(12)]
SLOW = {"type": "string", "pattern": "(a|aa)+b"}


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {
                f"a{n}": {"type": "object", "properties": {"format": STRING | {"title": str(n)}}} for n in range(12)
            },
        },
        {"type": "object", "properties": {"a": {**STRING, "examples": FORMATS, "default": SLOW, "enum": [SLOW]}}},
        {"type": "object", "properties": {"pattern": STRING, "minLength": {"type": "integer"}}},
    ],
)
def test_keywords_count_only_where_a_schema_has_them(schema: Any) -> None:
    assert not list(body_faults(formatted(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"default": SLOW}},
        {"type": "object", "properties": {"properties": {"type": "object", "properties": {"examples": SLOW}}}},
        {"$ref": "#/examples/0", "examples": [SLOW]},
        {"anyOf": [{"$ref": "#/%65xamples/0"}], "examples": [SLOW]},
        {"$defs": {"enum": SLOW}, "$ref": "#/$defs/enum"},
        {"properties": {"x": {"$ref": "#/$defs"}}, "$defs": SLOW},
        {"properties": {"x": {"$ref": "#/dependentSchemas"}}, "dependentSchemas": SLOW},
        {"properties": {"x": {"$ref": "#/$defs/a/properties"}}, "$defs": {"a": {"properties": SLOW}}},
        {"properties": {"x": {"$ref": "#/$defs/a/$defs"}}, "$defs": {"a": {"$defs": SLOW}}},
        {"patternProperties": {"(a|aa)+b": STRING}},
        {"type": "object", "additionalProperties": SLOW},
    ],
)
def test_no_place_hides_a_schema(schema: Any) -> None:
    assert [fault.param for fault in body_faults(formatted(schema))] == ["response_format"]
