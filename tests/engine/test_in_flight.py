"""How a request is ended that SGLang runs as several; needs SGLang, no engine."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from engine_ext.plugin.worker.in_flight import InFlight
from engine_ext.plugin.worker.marked import Told


def test_one_message_ends_all_prompts_of_a_list() -> None:
    sent, ended = list[Any](), list[str]()
    states = {f"a_{part}": SimpleNamespace(abort_requested=False) for part in (0, 2)}
    others = {"b_0": SimpleNamespace(abort_requested=False)}
    manager = SimpleNamespace(
        rid_to_state=states | others,
        logical_rid_to_child_rids={"a_1": {"x", "y"}},
        abort_request=ended.append,
        _dispatch_to_scheduler=sent.append,
    )
    in_flight = InFlight(manager)
    with pytest.raises(RuntimeError), in_flight.counted(Told("a", "kind", parts=4)):  # the last one has its answer
        raise RuntimeError
    assert ended == ["a", "a_1"]
    assert [each.rid for each in sent] == ["a_"]
    assert all(each.abort_requested for each in states.values())
    assert not others["b_0"].abort_requested
