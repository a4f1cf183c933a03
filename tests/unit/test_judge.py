"""What an answer is worth to its request."""

import json
import time
from typing import Any

import pytest

from service.estimates.outcomes import words_of
from service.objects.shards import Outcome
from service.queue.counts import Counts
from service.worker.answer_body import read, usage_of
from service.worker.judge import outcome_of, outcomes_of
from service.worker.schema_budget import MOST_CHECKS

TICKET = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "wish"]}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["kind"],
    "additionalProperties": False,
}
STRICT = {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": TICKET}}}

# Each definition asks for the next one twice.
DOUBLING = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {"d30": {}}
SLOW = {"patternProperties": {"^(a|a)*(a|a)*b$": {}}, "additionalProperties": False}
ALL_A = [{"$ref": "#/$defs/a"}] * 50
LONG_KEY = json.dumps({"a" * 60: 1})


def chat(*choices: tuple[str | None, str | None], **more: Any) -> dict[str, Any]:
    found = [{"message": {"role": "assistant", "content": text}, "finish_reason": why} for text, why in choices]
    return {"choices": found, "usage": {"prompt_tokens": 3, "completion_tokens": 5}, **more}


def response(text: str, status: str = "completed", because: str | None = None, kind: str = "output_text") -> Any:
    part = {"type": kind, "text": text, "refusal": text}
    items = [{"type": "reasoning", "summary": []}, {"type": "message", "content": [part]}]
    return {"status": status, "incomplete_details": because and {"reason": because}, "output": items}


def judged(asked: dict[str, Any], answer: Any) -> str:
    return outcome_of(asked, read(json.dumps(answer).encode())).name.lower()


@pytest.mark.parametrize(
    ("asked", "answer", "outcome"),
    [
        ({}, chat(("plain words", "stop")), "ok"),
        ({}, chat(("cut", "length")), "cut_off"),
        ({}, chat(("fine", "stop"), ("cut", "length")), "cut_off"),
        ({}, chat(("again and " * 30, "length")), "looped"),
        ({}, chat(("again and " * 30, "stop")), "ok"),
        ({}, {"choices": [{"message": {"reasoning_content": "so " * 99}, "finish_reason": "length"}]}, "looped"),
        (STRICT, {"choices": [{"message": {"reasoning_content": "hm"}, "finish_reason": "stop"}]}, "invalid"),
        ({}, chat(("…", "content_filter")), "refused"),
        ({}, {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]}, "refused"),
        ({}, {"choices": [{"text": "cut", "finish_reason": "length"}]}, "cut_off"),
        (STRICT, chat(('{"kind": "bug", "tags": ["a"]}', "stop")), "ok"),
        (STRICT, chat(('{"kind": "bug"', "stop")), "invalid"),
        (STRICT, chat(('{"kind": "other"}', "stop")), "invalid"),
        (STRICT, chat(('{"tags": []}', "stop")), "invalid"),
        (STRICT, chat(('{"kind": "bu', "length")), "cut_off"),  # which says what to do
        (STRICT, chat((None, "tool_calls")), "ok"),
        ({"response_format": {"type": "json_object"}}, chat(("[1]", "stop")), "invalid"),
        ({"response_format": {"type": "json_object"}}, chat(('{"a": 1}', "stop")), "ok"),
        ({"response_format": {"type": "text"}}, chat(("words", "stop")), "ok"),
        ({"json_schema": json.dumps(TICKET)}, {"choices": [{"text": "no", "finish_reason": "stop"}]}, "invalid"),
        ({}, response("fine"), "ok"),
        ({}, response("cut", "incomplete", "max_output_tokens"), "cut_off"),
        ({}, response("…", "incomplete", "content_filter"), "refused"),
        ({}, response("No.", kind="refusal"), "refused"),
        ({"text": {"format": {"type": "json_schema", "schema": TICKET}}}, response('{"kind": 1}'), "invalid"),
        ({"text": {"format": {"type": "json_schema", "schema": TICKET}}}, response('{"kind": "wish"}'), "ok"),
        ({}, {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 3}}, "ok"),
    ],
)
def test_each_answer_has_one_outcome(asked: dict[str, Any], answer: Any, outcome: str) -> None:
    assert judged(asked, answer) == outcome


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:9/schema.json"},  # nothing is fetched
        {"type": 7},
        {"type": "nonsense"},
        {"minLength": "x"},
        {"pattern": "(a+)+$"},  # the grammar's to enforce
        {"enum": ["x" * 70_000]},  # too large
    ],
)
def test_what_nobody_can_say_is_ok(schema: Any) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert judged(asked, chat(('"' + "a" * 40 + '!"', "stop"))) == "ok"


def test_a_schema_cannot_take_for_ever() -> None:
    twice = {"anyOf": [{"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["y"]}] * 2}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$defs": {"a": twice}, **twice}}}}
    deep = '{"x": ' * 60 + "1" + "}" * 60
    started = time.process_time()
    assert judged(asked, chat((deep, "stop"))) == "ok"
    assert time.process_time() - started < 10  # it would be 2 ** 60 checks, and is MOST_CHECKS
    assert MOST_CHECKS < 10_000
    assert judged(asked, chat(("[" * 100_000, "stop"))) == "invalid"


@pytest.mark.parametrize(
    "asked",
    [
        *({"text": "words"}, {"text": ["a"]}, {"text": {"format": "json"}}),
        *({"response_format": ["x"]}, {"json_schema": "{"}),
    ],
)
def test_a_parameter_of_another_form_costs_no_answer(asked: dict[str, Any]) -> None:
    assert judged(asked, chat(("not JSON", "stop"))) == "ok"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"uniqueItems": True}, json.dumps([1, "a"] * 10_000)),  # of kinds that cannot be sorted
        ({"items": {"enum": [f"word {n}" for n in range(3000)]}}, json.dumps(["none"] * 3000)),
        ({"items": {"multipleOf": 0}}, "[1]"),
    ],
)
def test_large_answers_cost_little(schema: Any, text: str) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    started = time.process_time()
    assert judged(asked, chat((text, "stop"))) == "ok"
    assert time.process_time() - started < 5  # it would be minutes


def test_errors_that_repeat_a_long_text_cost_what_they_are_long() -> None:
    """Each branch that does not match repeats the text, and none of them counted."""
    schema = {"not": {"anyOf": [{"type": "null"}] * 200 + [{"type": "string"}]}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert judged(asked, chat(('"words"', "stop"))) == "invalid"
    assert judged(asked, chat((f'"{"words " * 100_000}"', "stop"))) == "ok"  # after 8 errors nobody can say


def test_schemas_that_allow_nothing_cost_what_their_errors_are_long() -> None:
    for schema in ({"anyOf": [False] * 1500}, {"not": {"not": {"anyOf": [False] * 1500}}}):
        asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        assert judged(asked, chat(('"words"', "stop"))) == "invalid"
        assert judged(asked, chat((f'"{"words " * 100_000}"', "stop"))) == "ok"


def test_a_part_that_names_another_draft_has_the_same_budget() -> None:
    """Its draft's own checks took its place: they count nothing, and try patterns."""
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    schema = {"properties": {"a": {**draft, "pattern": "^(a+)+$"}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert judged(asked, chat(('{"a": "aaa!"}', "stop"))) == "ok"  # no pattern is tried
    twice = {"anyOf": [{"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["y"]}] * 2}
    schema = {"$defs": {"a": draft | twice}, **twice}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert judged(asked, chat(('{"x": ' * 14 + "1" + "}" * 14, "stop"))) == "ok"  # nobody can say


def test_choices_share_the_budget_of_their_answer() -> None:
    """A hundred choices cost no more than one; what needs no schema is said of those after it, too."""
    items = {"type": "array", "items": {"enum": ["a", "b"]}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": items}}}
    text, bad = json.dumps(["a"] * 900), json.dumps(["a", "z"])
    assert judged(asked, chat((bad, "stop"))) == "invalid"
    few = read(json.dumps(chat((text, "stop"), (bad, "stop"))).encode())
    assert outcomes_of(asked, few) == [Outcome.INVALID]
    many = read(json.dumps(chat(*[(text, "stop")] * 100, (bad, "stop"), ("[", "length"))).encode())
    assert outcomes_of(asked, many) == [Outcome.CUT_OFF]


def test_answers_in_a_form_of_their_own_are_not_judged() -> None:
    odd = read(b'{"choices": "many", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}')
    assert (outcome_of({}, odd), usage_of(odd).output) == (Outcome.OK, 4)


def test_counts_say_it_in_words() -> None:
    counts = Counts(completed=20, cut_off=18, cut_off_tokens=144, invalid=2, refused=1)
    cut = "18 of 20 answers were cut off by max_tokens or the model's context, after 8 tokens on average"
    found = words_of(counts, has_ended=False)
    assert [each.partition(":")[0] for each in found] == [
        cut,
        "2 of 20 answers are not the JSON that the request asked for",
    ]
    loops = words_of(Counts(completed=20, looped=1, cut_off=1, cut_off_tokens=9), has_ended=False)
    assert loops == []
    loops = words_of(Counts(completed=20, looped=2), has_ended=False)
    assert [each.partition(":")[0] for each in loops] == [
        "2 of 20 answers are the same words again and again until cut off"
    ]
    few = Counts(completed=19, cut_off=19, cut_off_tokens=19)
    assert words_of(few, has_ended=False) == []
    assert len(words_of(few, has_ended=True)) == 1
    assert words_of(Counts(completed=1000, cut_off=50, cut_off_tokens=50), has_ended=True) == []
    assert words_of(Counts(failed=5), has_ended=True) == []


def test_counts_of_an_older_version_are_read() -> None:
    assert Counts.parse("1,2,3,4,5,6") == Counts(1, 2, 3, 4, 5, 6)
    counts = Counts(*range(11))
    assert Counts.parse(str(counts)) == counts


@pytest.mark.parametrize(
    ("schema", "text", "outcome"),
    [
        # One check of each would take minutes to days, or jump to anywhere.
        ({"$defs": DOUBLING, "$ref": "#/$defs/d0", "unevaluatedProperties": False}, "{}", "ok"),
        (SLOW, LONG_KEY, "ok"),
        ({"items": {"$ref": "#x"}, "not": {"$anchor": "x"}}, "[1]", "ok"),
        ({"not": {"$ref": "#/$defs/0"}, "$defs": [SLOW]}, LONG_KEY, "ok"),
        ({"$defs": {"a": {"dependentRequired": {"a": [""] * 17_000}}}, "anyOf": ALL_A}, '{"a": 1}', "ok"),
        ({"$defs": {"a": {"const": [[{}] * 15_000]}}, "anyOf": ALL_A}, "1", "ok"),
        # What is left out costs no other keyword its check.
        ({"uniqueItems": True, "items": {"type": "string"}}, "[1]", "invalid"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "format": "date"}]}, "3", "invalid"),
        ({"$id": "http://x/y", "$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/$defs/a"}}, "[1]", "invalid"),
    ],
)
def test_each_check_is_bounded_or_nobody_can_say(schema: Any, text: str, outcome: str) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    started = time.process_time()
    assert judged(asked, chat((text, "stop"))) == outcome
    assert time.process_time() - started < 10
