"""Which answers are taken, and what another try asks."""

import json
import re
from typing import Any

import msgspec
import pytest

from batchweave.remote.accept import NAMES
from service.objects.shards import Outcome, Usage
from service.requests.accept import Accept, known
from service.worker.answer_body import Body, Choice, Message
from service.worker.tries import Tries

ALL = {"finish": "stop", "schema": True}


NO_ANSWER = Body()
CHAT = "/v1/chat/completions"
JSON = {"response_format": {"type": "json_object"}}


def tries(asked: Any = None, **accept: Any) -> Tries:
    return Tries(Accept.of(accept), CHAT, asked or {})


@pytest.mark.parametrize(
    ("accept", "asked", "taken"),
    [
        ({}, JSON, {"OK", "CUT_OFF", "INVALID", "REFUSED", "LOOPED"}),
        ({"continue": 5}, JSON, {"OK", "CUT_OFF", "INVALID", "REFUSED", "LOOPED"}),
        ({"finish": "stop"}, JSON, {"OK", "INVALID"}),
        ({"schema": True}, {}, {"OK", "CUT_OFF", "REFUSED", "LOOPED"}),
        ({"schema": True}, JSON, {"OK"}),  # half of it is no JSON
        (ALL, {}, {"OK"}),
    ],
)
def test_a_batch_takes_what_it_accepts(accept: dict[str, object], asked: dict[str, Any], taken: set[str]) -> None:
    made = tries(asked, **accept)
    assert {each.name for each in Outcome if made.takes(each)} == taken
    for each in Outcome:
        assert (made.refusal([each]) is None) == (each.name in taken)


def test_a_request_is_asked_again_so_often() -> None:
    made = tries(**ALL, retries=2)
    used = Usage(10, 4, 7, 1)
    assert [made.has_another([Outcome.INVALID], used, NO_ANSWER) for _ in range(4)] == [True, True, False, False]
    assert (made.number, made.spent, made.plus(used)) == (3, Usage(20, 8, 14, 2, 7), Usage(30, 12, 21, 3, 7))
    assert (made.refusal([Outcome.INVALID]) or {})["message"].startswith("The last of 3 answers was not the JSON")
    body = json.loads(made.noted(b'{"id": "a", "usage": {"prompt_tokens": 10}}'))
    spent = {"input_tokens": 20, "cached_tokens": 8, "output_tokens": 14, "reasoning_tokens": 2}
    assert body == {"id": "a", "usage": {"prompt_tokens": 10, "tries": 3, "not_accepted": spent}}
    assert not made.has_another([], used, NO_ANSWER)


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        ({"temperature": 0, "seed": 5}, {"temperature": 0.7, "seed": 6}),
        ({"temperature": 1.2}, {"temperature": 1.2, "seed": 1}),
        ({"top_p": 0}, {"temperature": 0.7, "seed": 1}),
        ({"temperature": 0.2, "top_k": 1, "top_p": 0.5}, {"temperature": 0.7, "top_p": 0.5, "seed": 1}),
        ({"seed": (1 << 63) - 1}, {"seed": 0}),  # SGLang holds 63 bits
    ],
)
def test_another_try_may_get_another_answer(asked: dict[str, Any], again: dict[str, Any]) -> None:
    made, before = tries(asked, **ALL, retries=1), dict(asked)
    assert made.next_body() == asked
    assert made.has_another([Outcome.CUT_OFF], Usage(), NO_ANSWER)
    assert made.is_due
    assert made.next_body() == again
    assert (asked, made.is_due) == (before, False)


def test_the_first_try_changes_no_byte() -> None:
    body = b'{"id":  "odd  spaces"}'
    assert tries().noted(body) is body
    with pytest.raises(msgspec.ValidationError):
        Accept.of({"retries": "many"})


def test_each_choice_of_an_answer_must_be_accepted() -> None:
    made = tries(finish="stop", retries=1)
    assert not made.has_another([Outcome.INVALID], Usage(), NO_ANSWER)
    assert made.has_another([Outcome.INVALID, Outcome.CUT_OFF], Usage(), NO_ANSWER)
    assert "was cut off" in (made.refusal([Outcome.INVALID, Outcome.CUT_OFF]) or {})["message"]


def test_lengths_are_those_of_answers_alone() -> None:
    made = tries(**ALL, retries=2)
    assert made.plus(Usage(10, 4, 7)).answer == 7
    assert made.has_another([Outcome.INVALID], Usage(10, 4, 7), NO_ANSWER)
    both = made.plus(Usage(10, 10, 5))
    assert (both, both.answer) == (Usage(20, 14, 12, 0, 5), 5)


def test_a_limit_that_the_context_cannot_hold_is_the_requests_own() -> None:
    made = tries({"max_tokens": 10}, **{"continue": 90})
    assert made.next_body() == {"max_completion_tokens": 100}
    assert not made.asks_for_less("invalid_request_error")
    assert made.asks_for_less("context_length_exceeded")
    assert made.next_body() == {"max_tokens": 10}
    assert not made.asks_for_less("context_length_exceeded")
    assert not tries({"max_tokens": 10}).asks_for_less("context_length_exceeded")


def test_the_command_line_knows_all_names() -> None:
    assert set(NAMES) == {each.encode_name for each in msgspec.structs.fields(Accept)}


def test_a_line_has_its_own_wishes_within_those_of_its_batch() -> None:
    batch = Accept.of({"finish": "stop", "retries": 2, "continue": 100, "thinking_tokens": 50})
    assert batch.with_line(None) is batch
    found = batch.with_line({"accept": {"retries": 0, "finish": None, "schema": True, "thinking_tokens": 20}})
    assert found == Accept(schema=True, more=100, thinking_tokens=20)
    none = batch.with_line({"accept": {"finish": None}})
    assert none == Accept(more=100, thinking_tokens=50), "nothing is left to ask again for"
    free = Accept().with_line({"accept": {"loops": "stop", "thinking_tokens": 10, "retries": 0}})
    assert free == Accept(loops="stop", thinking_tokens=10)


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ([], "'batchweave' must be an object"),
        ({}, "only field is 'accept'"),
        ({"accept": {}, "hold": True}, "only field is 'accept'"),
        ({"accept": None}, "only field is 'accept'"),
        ({"accept": {"retry": 1}}, "unknown field `retry`"),
        ({"accept": {"retries": 3}}, "'batchweave.accept.retries' is 3; the batch allows 2"),
        ({"accept": {"continue": 1}}, "'batchweave.accept.continue' is 1; the batch allows 0"),
        ({"accept": {"continue": True}}, "Expected `int`, got `bool`"),
        ({"accept": {"thinking_tokens": None}}, "'batchweave.accept.thinking_tokens' is null; the batch allows 50"),
        ({"accept": {"thinking_tokens": 51}}, "the batch allows 50"),
        ({"accept": {"retries": -1}}, "Expected `int` >= 0"),
        ({"accept": {"x" * 10_000: 1}}, "'batchweave.accept' is not valid: Object contains unknown field `xxx"),
    ],
)
def test_a_line_asks_for_no_more_than_its_batch_allows(extras: object, words: str) -> None:
    batch = Accept.of({"finish": "stop", "retries": 2, "thinking_tokens": 50})
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        batch.with_line(extras)
    assert len(str(caught.value)) < 300
    assert known(batch, extras) is batch


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "no": False}, "required": ["n"]}
ASKED = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "messages": [{"role": "user"}]}


def said(text: str, outcome: Outcome, asked: dict[str, Any] = ASKED, endpoint: str = CHAT) -> dict[str, Any]:
    """Return the body of the try after an answer with this text and outcome."""
    made = Tries(Accept.of({**ALL, "retries": 1, "explain": True}), endpoint, asked)
    made.next_body()
    assert made.has_another([outcome], Usage(), Body(choices=[Choice("stop", Message(text))]))
    return made.next_body()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"n": "one"}', 'does not meet the schema at $.n, where type is "integer"'),
        ("{}", 'does not meet the schema at $, where required is ["n"]'),
        ("none", "is not valid JSON: JSON is malformed"),
        ('{"n": 1, "no": 2}', "has a part that the schema does not allow"),
    ],
)
def test_a_try_is_told_what_was_wrong(text: str, why: str) -> None:
    first, shown, told = said(text, Outcome.INVALID)["messages"]
    assert first == {"role": "user"}
    assert shown == {"role": "assistant", "content": text}
    assert told["role"] == "user"
    assert told["content"].startswith(f"Your answer {why}")
    assert ASKED["messages"] == [{"role": "user"}]


def test_what_is_shown_of_an_answer_is_bounded() -> None:
    _, shown, told = said(json.dumps({"n": "x" * 100_000}), Outcome.INVALID)["messages"]
    assert len(shown["content"]) < 4010
    assert shown["content"].endswith(" [...]")
    assert 'where type is "integer"' in told["content"]
    assert len(told["content"]) < 600


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}]},
        {"messages": [{"role": "user", "content": "a"}], "input_ids": [1, 2]},
        {"messages": []},
    ],
)
def test_a_request_that_turns_cannot_follow_is_asked_as_it_is(asked: dict[str, Any]) -> None:
    """What continues a turn of the assistant would be answered from its beginning."""
    assert said("none", Outcome.INVALID, asked | JSON)["messages"] == asked["messages"]


@pytest.mark.parametrize("outcome", [Outcome.CUT_OFF, Outcome.LOOPED, Outcome.REFUSED])
def test_what_is_not_whole_is_just_asked_again(outcome: Outcome) -> None:
    """Small models take it up where it was cut off, and learn its loop."""
    assert said("none", outcome)["messages"] == ASKED["messages"]


def test_responses_are_told_in_their_own_form_and_completions_nothing() -> None:
    asked = {"input": "how many?", "text": {"format": {"type": "json_object"}}}
    first, *turns = said("none", Outcome.INVALID, asked, "/v1/responses")["input"]
    assert first == {"role": "user", "content": "how many?"}
    assert [each["role"] for each in turns] == ["assistant", "user"]
    plain = {"prompt": "how many?", **JSON}
    assert said("none", Outcome.INVALID, plain, "/v1/completions")["prompt"] == "how many?"


def test_several_choices_are_not_explained() -> None:
    made = Tries(Accept.of({**ALL, "retries": 1, "explain": True}), CHAT, ASKED)
    choice = Choice("stop", Message("none"))
    assert made.has_another([Outcome.INVALID], Usage(), Body(choices=[choice, choice]))
    assert made.next_body()["messages"] == ASKED["messages"]


@pytest.mark.parametrize("code", ["context_length_exceeded", "invalid_request", None])
def test_a_try_that_the_engine_refuses_for_its_turns_is_asked_without(code: str | None) -> None:
    """Such as by a template whose roles must alternate."""
    made = Tries(Accept.of({**ALL, "retries": 1, "explain": True, "continue": 5}), CHAT, ASKED | {"max_tokens": 10})
    assert made.has_another([Outcome.INVALID], Usage(), Body(choices=[Choice("stop", Message("none"))]))
    assert len(made.next_body()["messages"]) == 3
    assert made.asks_for_less(code)
    again = made.next_body()
    assert (again["messages"], again["max_completion_tokens"]) == (ASKED["messages"], 15)
    assert made.asks_for_less(code) == (code == "context_length_exceeded")
    assert not made.asks_for_less(code)
