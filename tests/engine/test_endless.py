"""Answers that would not end by themselves: the engine stops loops and closes thoughts, where requests want that."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.marks import Terms
from engine_ext.plugin.repeats import LEAST, REPEATS
from engine_ext.plugin.worker.answers import Answer
from engine_ext.plugin.worker.host import EngineHost
from service.demo.prompts import CHAT
from tests.engine.conftest import running_engine
from tests.engine.test_parsers import QWEN, with_template

MOST = 2000  # tokens of each answer
RESPONSES = "/v1/responses"
STOP = Terms(stops_loops=True)
SAME = {"logit_bias": {"300": 100}}  # the same token again and again
CYRILLIC = "".join(
    map(chr, range(0x430, 0x458))
)  # the tokenizer has only their bytes, so there is one way to write them
ROWS = {"regex": f"({CYRILLIC})+"}


@pytest.fixture(scope="module")
def thinker(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template by which it reasons unless it is told not to."""
    return with_template(demo, tmp_path_factory.mktemp("thinker") / "model", QWEN)


@pytest.fixture(scope="module")
def engine(thinker: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    with running_engine(thinker, {"reasoning_parser": "qwen3", "max_running_requests": 32}, log) as running:
        yield running


async def ask(host: EngineHost, bodies: list[dict[str, Any]], terms: Terms, endpoint: str = CHAT) -> list[Answer]:
    """Ask one after the other, so that none can wait for another."""
    plain = {"model": "batchweave-demo", "temperature": 0, "ignore_eos": True}
    if endpoint == CHAT:
        plain |= {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": MOST}
    else:
        plain = {"model": "batchweave-demo", "temperature": 0, "input": "Hello", "max_output_tokens": MOST}
    return [await host.run(endpoint, plain | body, f"r{number}", "test", terms) for number, body in enumerate(bodies)]


def tokens_of(answer: Answer) -> int:
    assert answer.status_code == 200, answer.body
    usage = json.loads(answer.body)["usage"]
    return int(usage.get("completion_tokens") or usage["output_tokens"])


def without_thinking(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"chat_template_kwargs": {"enable_thinking": False}}


def test_an_answer_ends_where_it_becomes_a_loop(engine: EngineProcess[Any]) -> None:
    bodies = [without_thinking(SAME), without_thinking(ROWS)]
    same, rows = engine.do(ask, bodies, STOP)
    assert (same.looped, tokens_of(same)) == (True, LEAST)
    [choice] = json.loads(rows.body)["choices"]
    assert (rows.looped, choice["finish_reason"]) == (True, "length")
    assert tokens_of(rows) == max(LEAST, REPEATS * len(CYRILLIC.encode()))
    for answer in engine.do(ask, bodies, Terms()):
        assert (answer.looped, tokens_of(answer)) == (False, MOST)


def test_a_thought_that_loops_is_closed_and_answered(engine: EngineProcess[Any]) -> None:
    [answer] = engine.do(ask, [SAME], STOP)
    [choice] = json.loads(answer.body)["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    assert answer.looped, "its text is a loop too"
    assert 2 * LEAST <= tokens_of(answer) < 2 * LEAST + 100


@pytest.mark.parametrize("most", [0, 20])
def test_a_request_thinks_no_longer_than_it_may(engine: EngineProcess[Any], most: int) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    formed = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    plain, json_only = engine.do(ask, [{}, formed | {"ignore_eos": False}], Terms(thinking_tokens=most))
    for answer in (plain, json_only):
        body = json.loads(answer.body)
        thought = body["usage"]["reasoning_tokens"]
        assert most <= thought <= most + 12, "with the tokens of its end"
        assert tokens_of(answer) > thought
        assert not answer.looped
    assert json.loads(json.loads(json_only.body)["choices"][0]["message"]["content"]) == {"n": 7}


def test_thoughts_without_a_bound_are_as_before(engine: EngineProcess[Any]) -> None:
    [answer] = engine.do(ask, [{}], Terms())
    [choice] = json.loads(answer.body)["choices"]
    assert choice["message"]["content"] in (None, "")
    assert tokens_of(answer) == MOST


def test_responses_are_bounded_too(engine: EngineProcess[Any]) -> None:
    [answer] = engine.do(ask, [{}], Terms(thinking_tokens=20), RESPONSES)
    body = json.loads(answer.body)
    kinds = [each["type"] for each in body["output"]]
    assert kinds == ["reasoning", "message"]
    assert 20 <= body["usage"]["output_tokens_details"]["reasoning_tokens"] <= 32
