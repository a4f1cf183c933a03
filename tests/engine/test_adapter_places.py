"""Which adapter makes way where SGLang has no place for another, and what tells adapters apart."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from engine_ext.plan.prompts import first_token
from engine_ext.plan.tree import common_prefix
from engine_ext.plugin.marks import KIND
from engine_ext.plugin.scheduler.adapters import held_back, waits_for_adapter
from engine_ext.plugin.worker.guard import own_space


@dataclass(frozen=True)
class Req:
    lora_id: str | None
    number: int = 0
    is_online: bool = False

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(custom_params=None if self.is_online else {KIND: "batch"})

    def finished(self) -> bool:
        return False


def scheduler(places: int = 2, **more: Any) -> Any:
    about = {"enable_lora": True, "lora_drainer": None, "enable_lora_overlap_loading": False, **more}
    return SimpleNamespace(max_loras_per_batch=places, **about)


def running(*adapters: str | None, is_online: bool = False) -> Any:
    return SimpleNamespace(reqs=[Req(each, number, is_online) for number, each in enumerate(adapters)])


def test_the_adapter_of_the_fewest_requests_makes_way() -> None:
    ours = [Req("c", 10), Req("a", 11), Req("b", 12)]
    assert held_back(scheduler(), [], ours, running("a", "b", "b")) == {ours[1]}
    assert held_back(scheduler(), [], [*ours[1:], ours[0]], running("a", "a", "b")) == {ours[2]}


def test_a_request_without_an_adapter_needs_a_place_too() -> None:
    ours = [Req(None, 10), Req("a", 11), Req("b", 12)]
    assert held_back(scheduler(), [], ours, running("a", "b", "b")) == {ours[1]}


def test_batches_make_way_for_online_requests_and_never_the_other_way_round() -> None:
    online, ours = [Req("c", 1, is_online=True)], [Req("a", 11), Req("b", 12)]
    assert held_back(scheduler(), online, ours, running("a", "b", "b")) == {ours[0]}
    theirs = running("a", is_online=True)
    theirs.reqs += running("b", "b").reqs
    assert held_back(scheduler(), online, ours, theirs) == {ours[1]}
    assert held_back(scheduler(), online, ours, running("a", "b", is_online=True)) == set()


@pytest.mark.parametrize(("places", "ours"), [(3, [Req("c"), Req("a")]), (2, [Req("a"), Req("b")]), (2, list[Req]())])
def test_where_all_have_a_place_nobody_waits(places: int, ours: list[Req]) -> None:
    assert held_back(scheduler(places), [], ours, running("a", "b")) == set()


def test_what_only_lacks_a_place_is_not_refused() -> None:
    assert waits_for_adapter(scheduler(), [Req("c")], running("a", "b"), None)
    assert waits_for_adapter(scheduler(), [Req("c")], running("a"), running("b"))
    assert not waits_for_adapter(scheduler(), [Req("a")], running("a", "b"), None)
    assert not waits_for_adapter(scheduler(3), [Req("c")], running("a", "b"), None)
    assert not waits_for_adapter(scheduler(enable_lora=False), [Req("c")], running("a", "b"), None)
    assert waits_for_adapter(scheduler(3, enable_lora_overlap_loading=True), [Req("c")], running("a"), None)


tokens = some.lists(some.integers(0, 200_000), min_size=1, max_size=20)


@given(tokens, tokens, some.text(max_size=5), some.text(max_size=5))
def test_prompts_share_prefixes_within_an_adapter_and_with_no_other(
    one: list[int], other: list[int], mine: str, theirs: str
) -> None:
    def told(prompt: list[int], adapter: str) -> Any:
        return np.array([first_token(prompt[0], adapter), *prompt[1:]], dtype=np.uint32)

    plain = [np.array(each, dtype=np.uint32) for each in (one, other)]
    assert common_prefix(told(one, mine), told(other, mine)) == common_prefix(*plain)
    assert common_prefix(told(one, mine), plain[0]) == 0
    if mine != theirs:
        assert common_prefix(told(one, mine), told(one, theirs)) == 0


def test_a_client_cannot_name_the_cache_of_an_adapter() -> None:
    adapter = "f" * 32
    for named in ({"extra_key": adapter}, {"cache_salt": "", "extra_key": adapter}, {"cache_salt": adapter}):
        found = own_space({"model": "m", **named})
        assert found.keys() == {"model", *named}
        assert {len(found[name]) for name in named} == {64}
    assert own_space({"extra_key": "x"}) == own_space({"extra_key": "x"}) != own_space({"extra_key": "y"})
    assert own_space({"cache_salt": "x"})["cache_salt"] != own_space({"extra_key": "x"})["extra_key"]
    assert [len(each) for each in own_space({"extra_key": ["x", adapter]})["extra_key"]] == [64, 64]
    for other in ({"model": "m"}, {"extra_key": None}, {"cache_salt": 5}, {"extra_key": {"a": "b"}}):
        assert own_space(other) == other
