"""Parameters that no engine knows are counted by name, within bounds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.endpoints import BY_PATH
from service.requests.accept import Accept
from service.requests.body_limits import REFUSED
from service.requests.parameters import KNOWN, MOST_CHARACTERS, MOST_TOLD, Unknown
from service.requests.unenforced import IGNORED

CHAT = "/v1/chat/completions"


def test_each_endpoint_knows_at_least_what_it_requires() -> None:
    assert KNOWN.keys() == BY_PATH.keys()
    for path, endpoint in BY_PATH.items():
        assert set(endpoint.required) <= KNOWN[path]


def test_unknown_names_are_counted_by_line_with_what_may_be_meant() -> None:
    unknown = Unknown(CHAT)
    for _ in range(3):
        unknown.count({"model": "m", "messages": [], "maxtokens": 5, "reasoning": {"effort": "low"}})
    unknown.count({"model": "m", "messages": [], "service_tier": "flex"})
    assert unknown.shapes() == [
        {"name": "maxtokens", "lines": 3, "similar": "max_tokens"},
        {"name": "service_tier", "lines": 1, "similar": None},
    ]


def test_a_parameter_of_another_endpoint_is_unknown() -> None:
    unknown = Unknown("/v1/responses")
    unknown.count({"model": "m", "input": "", "max_tokens": 5})
    assert [each["name"] for each in unknown.shapes()] == ["max_tokens"]


@pytest.mark.parametrize("name", ["x" * 1000, "\x00\x1b[2J", "é\u202e"])
def test_names_are_cut_and_can_be_printed(name: str) -> None:
    unknown = Unknown(CHAT)
    unknown.count({name: 1})
    [found] = unknown.shapes()
    assert found["name"].isprintable()
    assert len(found["name"]) <= 6 * MOST_CHARACTERS


def test_long_names_that_begin_alike_are_one() -> None:
    unknown = Unknown(CHAT)
    unknown.count({"x" * 64 + "a": 1, "x" * 64 + "b": 1})
    assert [(each["name"], each["lines"]) for each in unknown.shapes()] == [("x" * 64, 1)]


def test_of_many_names_those_are_told_that_may_be_mistakes() -> None:
    unknown = Unknown(CHAT)
    for number in range(1000):
        unknown.count({**{f"own_{each}": 1 for each in range(20)}, "maxtokens": 5, f"other{number}": 1})
    found = unknown.shapes()
    assert (found[0]["name"], found[0]["lines"], len(found)) == ("maxtokens", 1000, MOST_TOLD)
    assert {each["name"] for each in found[1:]} <= {f"own_{each}" for each in range(20)}


def test_what_this_service_refuses_is_neither_ignored_nor_suggested() -> None:
    unknown = Unknown("/v1/responses")
    unknown.count(dict.fromkeys(REFUSED))
    assert unknown.shapes() == []
    for name in (*REFUSED, "bootstrap_host", "rid"):
        for path in KNOWN:
            unknown = Unknown(path)
            unknown.count({f"{name}s": 1})
            assert [each["similar"] in {*REFUSED, "bootstrap_host", "rid"} for each in unknown.shapes()] == [False]


@pytest.mark.parametrize(
    ("endpoint", "body", "name"),
    [
        (CHAT, {"seed": 7}, "seed"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"top_logprobs": 5, "logprobs": True}, None),
        (CHAT, {"seed": None}, None),
        ("/v1/completions", {"best_of": 4}, "best_of"),
        ("/v1/completions", {"best_of": 2, "n": 2}, None),
        ("/v1/responses", {"store": True}, "store"),
        ("/v1/responses", {"store": False, "truncation": "disabled"}, None),
        ("/v1/responses", {"truncation": "auto"}, "truncation"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ("/v1/responses", {"include": "odd"}, None),
    ],
)
def test_what_has_no_effect_is_told_with_the_reason(endpoint: str, body: dict[str, object], name: str | None) -> None:
    unknown = Unknown(endpoint)
    unknown.count(body)
    unknown.count(body)
    found = unknown.shapes()
    assert [(each["name"], each["lines"], bool(each["why"])) for each in found] == ([(name, 2, True)] if name else [])


def test_what_no_grammar_enforces_is_told_once() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "integer", "multipleOf": 5}}}
    function = {"name": "x", "parameters": schema}
    for path, body, names in (
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, ["response_format"]),
        (CHAT, {"tools": [{"type": "function", "function": {**function, "strict": True}}]}, ["tools"]),
        (CHAT, {"tools": [{"type": "function", "function": function}]}, []),
        (CHAT, {"response_format": {"type": "json_object"}, "tools": "x"}, []),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": schema}}}, ["text.format"]),
        ("/v1/responses", {"tools": [{"type": "function", **function, "strict": True}]}, ["tools"]),
    ):
        unknown = Unknown(path)
        for _ in range(3):
            unknown.count(body)
        unknown.count({})
        told = [(each["name"], each["lines"], each["why"]) for each in unknown.shapes()]
        assert told == [(f"{name}.multipleOf", 3, IGNORED) for name in names]


ODD = [None, True, 0, -1.5, "", "a", [], ["a"], [1], [[]], [{}], {}, {"a": 1}, {"a": {}}]
NAMES = ["$ref", "allOf", "const", "enum", "format", "items", "minimum", "pattern", "properties", "required", "type"]


@given(st.recursive(st.sampled_from(ODD), lambda inside: st.dictionaries(st.sampled_from(NAMES), inside), max_leaves=8))
def test_no_schema_is_too_odd(schema: Any) -> None:
    tool = {"type": "function", "function": {"strict": True, "parameters": schema}}
    for body in (
        {"response_format": schema},
        {"response_format": {"json_schema": {"schema": schema}}, "text": {"format": schema}},
        {"tools": [schema, tool], "tool_choice": schema, "text": schema},
        {"tools": schema},
    ):
        for endpoint in KNOWN:
            unknown = Unknown(endpoint)
            unknown.finds_calls = False
            unknown.count(body)
            assert all(each["lines"] == 1 and each["name"].isprintable() for each in unknown.shapes())


def test_tools_are_told_if_nothing_finds_their_calls() -> None:
    unknown = Unknown(CHAT)
    unknown.count({"tools": [{"type": "function", "function": {"name": "x"}}]})
    unknown.count({"tools": [{"type": "function", "function": {"name": "x"}}], "tool_choice": "none"})
    unknown.count({"tools": []})
    assert unknown.shapes() == []
    unknown.finds_calls = False
    assert [(each["name"], each["lines"]) for each in unknown.shapes()] == [("tools", 1)]


def test_a_bound_of_thoughts_is_told_if_nothing_finds_them() -> None:
    unknown = Unknown(CHAT)
    unknown.count({}, Accept(thinking_tokens=0))
    unknown.count({})
    assert unknown.shapes() == []
    unknown.finds_thoughts = False
    [found] = unknown.shapes()
    assert (found["name"], found["lines"], found["similar"]) == ("accept.thinking_tokens", 1, None)


def test_explain_is_told_where_nothing_can_be_explained() -> None:
    accept = Accept(schema=True, retries=1, explain=True)
    for endpoint, body, lines in ((CHAT, {}, 0), (CHAT, {"n": 2}, 1), (CHAT, {"n": 1}, 0), ("/v1/completions", {}, 1)):
        unknown = Unknown(endpoint)
        unknown.count({**body, "response_format": {"type": "json_object"}}, accept)
        assert sum(each["lines"] for each in unknown.shapes() if each["name"] == "accept.explain") == lines


def test_seeds_are_kept_by_deterministic_inference() -> None:
    unknown = Unknown(CHAT, keeps_seeds=True)
    unknown.count({"seed": 7})
    assert unknown.shapes() == []
