"""What SGLang's grammars enforce of JSON schemas, by its real library, beside what we say of it."""

import json
from typing import Any

import jsonschema
import pytest
import xgrammar

from service.requests.unenforced import EXACT, ROUGH, unenforced

STOP = 256
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
NUMBERS = {"type": "array", "items": INTEGER}


def record(inside: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inside}, "required": ["a"], "additionalProperties": False, **more}


def two(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False, **more}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """A compiler for a vocabulary of single bytes."""
    vocabulary = [*(bytes([each]) for each in range(STOP)), b"<stop>"]
    kind, size = xgrammar.VocabType.RAW, len(vocabulary)
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=kind, vocab_size=size, stop_token_ids=[STOP])
    return xgrammar.GrammarCompiler(info)


def accepts(compiler: xgrammar.GrammarCompiler, schema: Any, answer: Any) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), any_whitespace=True))
    return all(matcher.accept_token(each) for each in [*json.dumps(answer).encode(), STOP])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**INTEGER, "minimum": 1, "maximum": 5}, 5, 6),
        ({"type": ["integer", "null"], "minimum": 1, "maximum": 5}, 5, 6),
        ({**NUMBERS, "minItems": 2}, [1, 2], [1]),
        ({**NUMBERS, "maxItems": 2}, [1, 2], [1, 2, 3]),
        ({"items": INTEGER, "minItems": 2}, [1, 2], [1]),
        ({"type": "array", "prefixItems": [INTEGER, TEXT]}, [1, "a"], ["a", "a"]),
        ({**TEXT, "pattern": "^[a-z]*$"}, "ab", "AB"),
        ({**TEXT, "minLength": 2}, "ab", "a"),
        ({"type": ["string", "null"], "maxLength": 2}, "ab", "abc"),
        ({**TEXT, "format": "date"}, "2026-11-28", "today"),
        ({**TEXT, "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "1"),
        ({"const": 5}, 5, 6),
        ({"type": "string", "enum": ["x", "y"]}, "x", "z"),
        ({"anyOf": [INTEGER, {"type": "null"}]}, 5, "x"),
        ({"oneOf": [INTEGER, {"type": "null"}]}, 5, "x"),
        ({"$defs": {"x": INTEGER}, "allOf": [{"$ref": "#/$defs/x"}]}, 5, "x"),
        ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "description": "a number", "default": 1}, 5, "x"),
        (record(INTEGER), {"a": 5}, {}),
        (record(INTEGER), {"a": 5}, {"a": 5, "b": 5}),
        ({"properties": {"a": INTEGER}, "required": ["a"]}, {"a": 5}, {}),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, {"a": 1, "b": 1}, {"a": 1}),
        ({"type": "object", "patternProperties": {"^x$": INTEGER}}, {"x": 1}, {"x": "a"}),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, {"a": 1}, {"A": 1}),
        (two(minProperties=1), {"a": 1}, {}),
        (record({"type": "array", "items": {"enum": ["multipleOf", "not"]}}, examples=[{"not": 5}]), {"a": ["not"]}, 5),
    ],
)  # fmt: skip
def test_what_is_not_told_is_enforced(compiler: xgrammar.GrammarCompiler, schema: Any, good: Any, bad: Any) -> None:
    assert unenforced(schema) == {}
    assert accepts(compiler, schema, good)
    assert not accepts(compiler, schema, bad)


@pytest.mark.parametrize(
    ("keyword", "schema", "good", "bad"),
    [
        ("multipleOf", {**INTEGER, "multipleOf": 1000}, 2000, 7),
        ("uniqueItems", {"type": "array", "items": {"enum": ["x"]}, "uniqueItems": True}, ["x"], ["x", "x"]),
        ("contains", {**NUMBERS, "contains": {"const": 5}}, [5], [1]),
        ("minLength", {**TEXT, "pattern": "^[a-z]*$", "minLength": 3}, "abc", "a"),
        ("maxLength", {**TEXT, "pattern": "^[a-z]*$", "maxLength": 3}, "abc", "abcd"),
        ("maxLength", {**TEXT, "format": "email", "maxLength": 8}, "a@b.co", "aaaaaaaaaa@b.co"),
        ("pattern", {**TEXT, "format": "date", "pattern": "^2"}, "2026-11-28", "1026-11-28"),
        ("format", {**TEXT, "format": "regex"}, "a", "["),
        ("minLength", {"minLength": 3}, "abc", "a"),
        ("maximum", {"maximum": 5}, 5, 6),
        ("required", {"required": ["a"]}, {"a": 5}, {}),
        ("required", record(INTEGER, required=["a", "b"], additionalProperties=True), {"a": 5, "b": 5}, {"a": 5}),
        ("not", {"not": TEXT}, 5, "a"),
        ("if", record(INTEGER, **{"if": record({"const": 1}), "then": False}), {"a": 2}, {"a": 1}),
        ("dependentRequired", two(dependentRequired={"a": ["b"]}), {"a": 1, "b": 1}, {"a": 1}),
        ("dependentSchemas", two(dependentSchemas={"a": {"required": ["b"]}}), {"a": 1, "b": 1}, {"a": 1}),
        ("dependencies", two(dependencies={"a": ["b"]}), {"a": 1, "b": 1}, {"a": 1}),
        ("contentEncoding", {**TEXT, "contentEncoding": "base64"}, "YQ==", "@"),
        ("contentMediaType", {**TEXT, "contentMediaType": "application/json"}, "{}", "{"),
        ("$dynamicRef", {"$defs": {"x": {"$dynamicAnchor": "n", **INTEGER}}, "$dynamicRef": "#n"}, 5, "a"),
        ("allOf", {"allOf": [{**TEXT, "minLength": 3}, {**TEXT, "maxLength": 5}]}, "abc", "a"),
        ("minLength", {"anyOf": [TEXT, {"type": "null"}], "minLength": 3}, "abc", "a"),
        ("minLength", {"oneOf": [TEXT, {"type": "null"}], "minLength": 3}, "abc", "a"),
        ("minLength", {"allOf": [TEXT], "minLength": 3}, "abc", "a"),
        ("minLength", {"$defs": {"x": TEXT}, "$ref": "#/$defs/x", "minLength": 3}, "abc", "a"),
        ("minimum", {**INTEGER, "minimum": 3}, 10, 1),
        ("minimum", {**INTEGER, "minimum": 3, "exclusiveMinimum": 1}, 10, 2),
        ("enum", {"$defs": {"x": TEXT}, "$ref": "#/$defs/x", "enum": ["a"]}, "a", "b"),
        ("const", {"$defs": {"x": TEXT}, "$ref": "#/$defs/x", "const": "a"}, "a", "b"),
        ("type", {"$defs": {"x": {"type": ["string", "integer"]}}, "$ref": "#/$defs/x", "type": "string"}, "a", 5),
        ("minimum", {"enum": [1, 5], "minimum": 3}, 5, 1),
        ("anyOf", {"enum": ["a", "b"], "anyOf": [{"const": "a"}]}, "a", "b"),
        ("oneOf", {"anyOf": [{"const": "a"}, {"const": "b"}], "oneOf": [{"const": "a"}]}, "a", "b"),
        ("allOf", {"oneOf": [{"const": "a"}, {"const": "b"}], "allOf": [{"const": "a"}]}, "a", "b"),
        ("minimum", {"type": "number", "minimum": 0, "maximum": 1}, 0.5, 1.5),
        ("minimum", {**INTEGER, "minimum": 142, "maximum": 153}, 142, 154),
        ("not", {"type": "array", "items": {"not": TEXT}}, [5], ["a"]),
        ("not", {"properties": {"format": {"not": TEXT}}, "required": ["format"]}, {"format": 5}, {"format": "a"}),
    ],
)  # fmt: skip
def test_what_is_told_may_be_broken(
    compiler: xgrammar.GrammarCompiler, keyword: str, schema: Any, good: Any, bad: Any
) -> None:
    assert keyword in unenforced(schema)
    assert accepts(compiler, schema, good)
    assert accepts(compiler, schema, bad)


BOUNDS = [*range(-40, 41), 99, 100, 101, 123, 255, 1000, 1015]


@pytest.mark.parametrize("names", [("minimum",), ("exclusiveMinimum",), ("maximum",), ("exclusiveMaximum",)])
def test_one_bound_is_exact_unless_it_is_told(compiler: xgrammar.GrammarCompiler, names: tuple[str, ...]) -> None:
    told = set[int]()
    for bound in BOUNDS:
        schema = {**INTEGER, **dict.fromkeys(names, bound)}
        if unenforced(schema):
            told.add(bound)
        else:
            assert not outside(compiler, schema, {*range(-50, 50), *range(bound - 20, bound + 20), bound * 10})
    assert not told & {10, 20}


def test_two_small_bounds_are_exact(compiler: xgrammar.GrammarCompiler) -> None:
    for least in range(-EXACT, EXACT, 37):
        for most in range(least, EXACT + 1, 29):
            schema = {**INTEGER, "minimum": least, "maximum": most}
            assert unenforced(schema) == {}
            near = {*range(least - 3, least + 4), *range(most - 3, most + 4), least * 10, most * 10}
            assert not outside(compiler, schema, near)


def outside(compiler: xgrammar.GrammarCompiler, schema: dict[str, Any], numbers: set[int]) -> set[int]:
    """Return those of the numbers that the grammar accepts, and the schema does not."""
    judge = jsonschema.Draft202012Validator(schema)
    return {each for each in numbers if accepts(compiler, schema, each) and not judge.is_valid(each)}


def test_what_is_rough_is_told_as_rough() -> None:
    assert unenforced({**INTEGER, "exclusiveMaximum": 1000, "multipleOf": 5})["exclusiveMaximum"] == ROUGH
