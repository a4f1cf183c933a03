"""Which answers are taken, and what another try asks."""

import json
import re

import msgspec
import pytest

from service.objects.shards import Outcome, Usage
from service.requests.accept import Accept
from service.worker.tries import Tries, takes

ALL = {"finish": "stop", "schema": True}


@pytest.mark.parametrize(
    ("accept", "taken"),
    [
        (None, {"OK", "CUT_OFF", "INVALID", "REFUSED", "LOOPED"}),
        ({"continue": 5}, {"OK", "CUT_OFF", "INVALID", "REFUSED", "LOOPED"}),
        ({"finish": "stop"}, {"OK", "INVALID"}),
        ({"schema": True}, {"OK", "CUT_OFF", "REFUSED", "LOOPED"}),
        (ALL, {"OK"}),
    ],
)
def test_a_batch_takes_what_it_accepts(accept: dict[str, object] | None, taken: set[str]) -> None:
    assert {each.name for each in Outcome if takes(Accept.of(accept), each)} == taken
    for each in Outcome:
        assert (Tries(Accept.of(accept)).refusal(each) is None) == (each.name in taken)


def test_a_request_is_asked_again_so_often() -> None:
    tries = Tries(Accept.of({**ALL, "retries": 2}))
    used = Usage(10, 4, 7, 1)
    assert [tries.has_another(Outcome.INVALID, used) for _ in range(4)] == [True, True, False, False]
    assert (tries.number, tries.spent, tries.plus(used)) == (3, Usage(20, 8, 14, 2, 7), Usage(30, 12, 21, 3, 7))
    assert "3 times" in (tries.refusal(Outcome.INVALID) or {})["message"]
    body = json.loads(tries.noted(b'{"id": "a", "usage": {"prompt_tokens": 10}}'))
    spent = {"input_tokens": 20, "cached_tokens": 8, "output_tokens": 14}
    assert body == {"id": "a", "usage": {"prompt_tokens": 10, "tries": 3, "not_accepted": spent}}
    assert not tries.has_another(Outcome.OK, used)


def test_another_try_may_get_another_answer() -> None:
    tries = Tries(Accept.of({**ALL, "retries": 1}))
    greedy, sampled = {"temperature": 0, "seed": 5}, {"temperature": 1.2}
    assert (tries.body(greedy), tries.body(sampled)) == (greedy, sampled)
    assert tries.has_another(Outcome.CUT_OFF, Usage())
    assert tries.body(greedy) == {"temperature": 0.7, "seed": 6}
    assert tries.body(sampled) == sampled
    assert greedy == {"temperature": 0, "seed": 5}


def test_the_first_try_changes_no_byte() -> None:
    body = b'{"id":  "odd  spaces"}'
    assert Tries(Accept()).noted(body) is body
    with pytest.raises(msgspec.ValidationError):
        Accept.of({"retries": "many"})


def test_lengths_are_those_of_answers_alone() -> None:
    tries = Tries(Accept.of({**ALL, "retries": 2}))
    assert tries.plus(Usage(10, 4, 7)) == Usage(10, 4, 7)
    assert tries.has_another(Outcome.INVALID, Usage(10, 4, 7))
    assert tries.plus(Usage(10, 10, 5)) == Usage(20, 14, 12, 0, 5)


def test_a_line_has_its_own_wishes_within_those_of_its_batch() -> None:
    batch = Accept.of({"finish": "stop", "retries": 2, "continue": 100, "thinking_tokens": 50})
    assert batch.with_line(None) is batch
    found = batch.with_line({"accept": {"retries": 0, "finish": None, "schema": True, "thinking_tokens": 20}})
    assert found == Accept(schema=True, more=100, thinking_tokens=20)
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
        ({"accept": {"thinking_tokens": None}}, "'batchweave.accept.thinking_tokens' is None; the batch allows 50"),
        ({"accept": {"thinking_tokens": 51}}, "the batch allows 50"),
        ({"accept": {"retries": -1}}, "Expected `int` >= 0"),
    ],
)
def test_a_line_asks_for_no_more_than_its_batch_allows(extras: object, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Accept.of({"finish": "stop", "retries": 2, "thinking_tokens": 50}).with_line(extras)
