"""What a worker asks its engine for on a GPU, before it says that it is ready; here on a CPU."""

from typing import Any

import pytest

pytest.importorskip("sglang")

from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.worker import kernels


def test_each_kind_of_sampling_is_asked_for_and_no_request_counts_as_online(engine: EngineProcess[Any]) -> None:
    async def ask(host: Any) -> tuple[list[str], dict[str, Any]]:
        refused = await kernels.ask_for_each(host._engine)
        [state] = await host.scheduler_states()
        return refused, state

    refused, state = engine.do(ask)
    assert not refused
    assert state["online_ended"] == 0
    assert state["admitted"] == len(kernels.KINDS) + 1


def test_what_an_engine_cannot_do_is_named(engine: EngineProcess[Any]) -> None:
    async def ask(host: Any) -> list[str]:
        kernels.KINDS["nothing"] = {"json_schema": "no schema"}
        return await kernels.ask_for_each(host._engine)

    assert engine.do(ask) == ["nothing"]
