"""By which keys the lengths of answers are remembered."""

from typing import Any

import pytest

from service.requests.likeness import BEGINNING, NOTHING, keys_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = list(range(200))
KNOWN = (3900779273065531803, 1366704436392936777)  # of PROMPT; stored in databases, so it must not change


def keys(
    body: dict[str, Any] | None = None, prompt: list[int] = PROMPT, most: int = 100, **said: Any
) -> tuple[int, int]:
    endpoint, scope = said.get("endpoint", CHAT), said.get("scope", "project model")
    return keys_of(scope, endpoint, body or {}, prompt, most, said.get("exact", False), said.get("thinking"))


def test_keys_are_the_same_in_every_process_and_fit_a_signed_column() -> None:
    assert keys() == KNOWN
    assert all(0 < key < 1 << 63 for key in KNOWN)


def test_prompts_that_differ_behind_their_beginning_are_alike() -> None:
    other = PROMPT[:BEGINNING] + [7] * 100
    assert keys(prompt=other) == keys()
    assert keys(prompt=[7, *PROMPT[1:]])[0] != keys()[0]
    assert keys(prompt=[7, *PROMPT[1:]])[1] == keys()[1]
    assert keys(prompt=PROMPT * 4)[0] == keys()[0]
    assert keys(prompt=PROMPT * 4)[1] != keys()[1]


@pytest.mark.parametrize(
    "other",
    [
        keys({"reasoning_effort": "high"}),
        keys({"chat_template_kwargs": {"enable_thinking": False}}),
        keys({"response_format": {"type": "json_object"}}),
        keys({"stop": ["\n"]}),
        keys(most=1000),
        keys(scope="another"),
        keys(endpoint=TEXT),
        keys(thinking=0),
        keys(thinking=4000),
    ],
)
def test_what_changes_the_length_of_an_answer_makes_another_key(other: tuple[int, int]) -> None:
    assert other[0] != keys()[0]
    assert other[1] != keys()[1]


def test_what_does_not_change_it_does_not() -> None:
    assert keys({"temperature": 0.3, "seed": 5, "user": "u", "n": 1}) == keys()
    assert keys(most=101) == keys()  # of the same octave


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, {}),
        ({"best_of": 3}, {}),
        ({"prompt": ["one", "two"]}, {"endpoint": TEXT}),
        ({"prompt": [[1], [2]]}, {"endpoint": TEXT}),
        ({}, {"exact": True}),
    ],
)
def test_answers_that_say_nothing_about_others_have_no_keys(body: dict[str, Any], said: dict[str, Any]) -> None:
    assert keys(body, **said) == NOTHING


def test_a_prompt_of_token_ids_is_one_prompt() -> None:
    assert keys({"prompt": [1, 2, 3]}, endpoint=TEXT) != NOTHING
