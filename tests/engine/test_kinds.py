"""Engines that are not the ordinary one: each answers as SGLang alone does, or says why the scan does not drive it.

docs/engine.md lists what runs under the scan and what falls back.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine.tuning import Tuning
from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.worker.host import EngineHost
from service.demo.prompts import COMPLETIONS
from service.demo.tiny import NAME
from tests.engine import windows
from tests.engine.conftest import running_bench, running_engine
from tests.engine.test_real_scan import CAPACITY, CHUNK, Requests, both_ends, documents, run_within

WAIT_S = 240


@contextmanager
def bench(model: Path, arguments: dict[str, Any], log: Path) -> Generator[Any, None, None]:
    """An engine that runs requests under SGLang's fcfs or under the scan, and returns the run's figures."""
    small = {"max_total_tokens": CAPACITY, "chunked_prefill_size": CHUNK, "max_running_requests": 16}
    with running_bench(model, Overlap.NONE, small | arguments, log) as engine:

        def run(policy: str | None, requests: Requests) -> dict[str, Any]:
            return engine.do(run_within, Tuning(policy, CHUNK), requests)

        yield run


async def ask_all(
    host: Any, numbers: range, more: Callable[[int], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Ask all at once; return the answers in the order of their numbers, and the numbers in that of their ends."""
    ended: list[int] = []

    async def ask(number: int) -> dict[str, Any]:
        prompt = f"question {number} " + "about this " * 60
        body = {"model": NAME, "prompt": prompt, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        answer = await host.run(COMPLETIONS, body | more(number), f"kinds-{number:03}", "kind")
        assert answer.status_code == 200
        ended.append(number)
        return dict(json.loads(answer.body))

    async with asyncio.timeout(WAIT_S):
        return list(await asyncio.gather(*(ask(number) for number in numbers))), ended


def few(requests: Requests) -> Requests:
    return requests[::2]


@pytest.mark.parametrize(
    "arguments",
    [
        {"chunked_prefill_size": -1, "mem_fraction_static": 0.5},
        pytest.param({"disable_radix_cache": True}, marks=pytest.mark.slow),
    ],
)
def test_whole_prompts_and_no_prefix_cache(demo: Path, log: Path, arguments: dict[str, Any]) -> None:
    """SGLang turns chunked prefill off for some models, and for some the prefix cache too."""
    requests = few([*both_ends(), *documents()])

    with bench(demo, arguments, log) as run:
        theirs, ours = run("fcfs", requests), run(None, requests)

    assert ours["answers"] == theirs["answers"]
    assert ours["scheduling"] == "dual-scan"
    assert ours["admitted"] == len(requests) + ours["retractions"]


@pytest.mark.slow
def test_pipeline_parallelism_falls_back_to_sglang(demo: Path, log: Path) -> None:
    small = {"max_total_tokens": CAPACITY, "max_running_requests": 16, "chunked_prefill_size": 256}

    with running_engine(demo, small | {"pp_size": 2}, log) as engine:
        ours, _ = engine.do(ask_all, range(24), lambda number: {})
        [state, *_] = engine.do(EngineHost.scheduler_states)
    with running_engine(demo, small, log) as engine:
        theirs, _ = engine.do(ask_all, range(24), lambda number: {})

    assert [answer["choices"] for answer in ours] == [answer["choices"] for answer in theirs]
    assert state["scheduling"] == "sglang"
    assert "decisions" not in state


def test_sliding_windows_have_a_pool_of_their_own(demo: Path, tmp_path: Path, log: Path) -> None:
    """Both pools, SGLang's radix cache for them and the scan; each answer is the one that a request gets alone."""
    model = tmp_path / "windows"
    shutil.copytree(demo, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0], "sliding_window": windows.WINDOW}
    (model / "config.json").write_text(json.dumps(config))
    # From 0.4 downwards SGLang retracts, and then a few answers differ on this patched CPU, by its own policy too.
    arguments = {"max_total_tokens": CAPACITY, "max_running_requests": 32, "swa_full_tokens_ratio": 0.6}
    with running_engine(model, arguments, log, before=windows.install) as engine:
        together, _ = engine.do(ask_all, range(60), lambda number: {})
        alone = [engine.do(ask_all, range(k, k + 1), lambda number: {})[0][0] for k in range(0, 60, 4)]
        [state] = engine.do(EngineHost.scheduler_states)

    assert [answer["choices"][0]["text"] for answer in together[::4]] == [each["choices"][0]["text"] for each in alone]
    assert state["scheduling"] == "dual-scan"
    assert state["retractions"] <= 2  # none as a rule; one was seen where the requests came late under load


@pytest.fixture(scope="module")
def mixing(demo: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    arguments = {"enable_mixed_chunk": True, "max_total_tokens": CAPACITY, "max_running_requests": 16}
    with running_engine(demo, arguments | {"chunked_prefill_size": 256}, log) as engine:
        yield engine


def test_requests_with_logprobs_run_apart_and_let_the_others_mix(mixing: EngineProcess[Any]) -> None:
    """SGLang mixes no chunks while one of them runs; decodes must not stand still for each small chunk then."""
    found, ended = mixing.do(ask_all, range(80), lambda number: {} if number % 2 else {"logprobs": 1})

    assert all(bool(answer["choices"][0]["logprobs"]) == (number % 2 == 0) for number, answer in enumerate(found))
    # Those without come first, but for what began before all had come.
    late = [number for number in ended[-20:] if number % 2 == 1]
    assert len(late) <= 4


@pytest.mark.parametrize(
    ("unusual", "word"),
    [
        ({"ps": SimpleNamespace(pp_size=2)}, "pipeline"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"enable_hisparse": True}, "sparse"),
        ({"enable_hicache_storage": True}, "storage"),
        ({"dllm_config": object()}, "diffusion"),
        ({}, None),
    ],
)
def test_what_falls_back_says_why(unusual: dict[str, Any], word: str | None) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    from engine_ext.plugin.scheduler.fallback import reason_for_sglang

    ordinary = {
        "ps": SimpleNamespace(pp_size=1),
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "disaggregation_mode": DisaggregationMode.NULL,
        "enable_hisparse": False,
        "enable_hicache_storage": False,
        "dllm_config": None,
    }
    reason = reason_for_sglang(SimpleNamespace(**ordinary | unusual))

    assert reason is None if word is None else word in str(reason)
