"""Parameters that no engine knows are counted by name, within bounds."""

import pytest

from service.endpoints import BY_PATH
from service.requests.parameters import KNOWN, MOST_CHARACTERS, MOST_NAMES, Unknown

CHAT = "/v1/chat/completions"


def test_each_endpoint_knows_at_least_what_it_requires() -> None:
    assert KNOWN.keys() == BY_PATH.keys()
    for path, endpoint in BY_PATH.items():
        assert set(endpoint.required) <= KNOWN[path]


def test_unknown_names_are_counted_by_line_with_what_may_be_meant() -> None:
    unknown = Unknown(CHAT)
    for _ in range(3):
        unknown.see({"model": "m", "messages": [], "maxtokens": 5, "reasoning": {"effort": "low"}})
    unknown.see({"model": "m", "messages": [], "service_tier": "flex"})
    assert unknown.shapes() == [
        {"name": "maxtokens", "lines": 3, "similar": "max_tokens"},
        {"name": "service_tier", "lines": 1, "similar": None},
    ]


def test_a_parameter_of_another_endpoint_is_unknown() -> None:
    unknown = Unknown("/v1/responses")
    unknown.see({"model": "m", "input": "", "max_tokens": 5})
    assert [each["name"] for each in unknown.shapes()] == ["max_tokens"]


@pytest.mark.parametrize("name", ["x" * 1000, "\x00\x1b[2J", "é\u202e"])
def test_names_are_cut_and_can_be_printed(name: str) -> None:
    unknown = Unknown(CHAT)
    unknown.see({name: 1})
    [found] = unknown.shapes()
    assert found["name"].isprintable()
    assert len(found["name"]) <= 6 * MOST_CHARACTERS


def test_a_file_of_many_names_is_remembered_in_part() -> None:
    unknown = Unknown(CHAT)
    for number in range(1000):
        unknown.see({f"name{number}": 1, "often": 1})
    found = unknown.shapes()
    assert len(found) == MOST_NAMES
    assert (found[0]["name"], found[0]["lines"]) == ("often", 1000)
