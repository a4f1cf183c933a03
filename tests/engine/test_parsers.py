"""What finds tool calls and reasoning in answers: SGLang's parsers, taken by the model's chat template."""

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_process import EngineProcess
from engine_ext.errors import EngineStartError
from engine_ext.plugin.worker import parsers
from engine_ext.plugin.worker.host import EngineHost
from service.demo.prompts import CHAT
from service.demo.tiny import CHAT_TEMPLATE
from tests.engine.conftest import running_engine

AUTO = {"tool_call_parser": "auto", "reasoning_parser": "auto"}
# What SGLang's rules look for in the templates of Qwen's models.
QWEN = (
    "{% if tools %}{{ '<|system|>\n# Tools\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '</tools>\nreturn a json object within <tool_call></tool_call> tags: <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|end|>\n\' }}{% endif %}'
    f"{CHAT_TEMPLATE}"
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
CITIES = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"name": "get_weather", "parameters": {"type": "object", **CITIES}, "strict": True}
BODY: dict[str, Any] = {
    "model": "batchweave-demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 200,
    "temperature": 0,
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
}


def with_template(demo: Path, folder: Path, template: str) -> Path:
    """A copy of the demo's model with another chat template."""
    shutil.copytree(demo, folder)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def qwen(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template such as Qwen's."""
    return with_template(demo, tmp_path_factory.mktemp("qwen") / "model", QWEN)


@pytest.fixture(scope="module")
def engine(qwen: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    # A parser of reasoning would wait for its end, which noise never writes, before a call is enforced.
    given = {"tool_call_parser": "auto", "max_running_requests": 32, "constrained_json_disable_any_whitespace": True}
    with running_engine(qwen, given, log) as running:
        yield running


def test_parsers_are_those_of_the_chat_template(qwen: Path, demo: Path) -> None:
    assert parsers.chosen(str(qwen), AUTO) == ("qwen", "qwen3")
    assert parsers.chosen(str(demo), AUTO) == (None, None)
    assert parsers.chosen(str(demo), {"tool_call_parser": "llama3"}) == ("llama3", None)
    with pytest.raises(EngineStartError, match="has no tool_call_parser 'qwn'"):
        parsers.check({"tool_call_parser": "qwn"})


def test_no_reasoning_is_looked_for_where_nothing_says_when_the_model_reasons(demo: Path, tmp_path: Path) -> None:
    """SGLang takes `deepseek-r1` for such a template, by which each answer is reasoning until it ends."""
    model = with_template(demo, tmp_path / "model", f"{{# it may write <think></think> #}}{CHAT_TEMPLATE}")
    assert parsers.chosen(str(model), AUTO) == (None, None)
    assert parsers.chosen(str(model), {"reasoning_parser": "deepseek-r1"}) == (None, "deepseek-r1")


@pytest.mark.parametrize("choice", [BODY["tool_choice"], "required"])
def test_a_forced_call_is_a_call(engine: EngineProcess[Any], choice: Any) -> None:
    answer = engine.do(EngineHost.run, CHAT, {**BODY, "tool_choice": choice}, "call", "test")
    [found] = json.loads(answer.body)["choices"]
    assert found["finish_reason"] == "tool_calls"
    for call in found["message"]["tool_calls"]:
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_a_response_has_its_call(engine: EngineProcess[Any]) -> None:
    body = {
        "model": "batchweave-demo",
        "input": "Hello",
        "max_output_tokens": 200,
        "tools": [{"type": "function", **WEATHER}],
        "tool_choice": "required",
    }
    answer = engine.do(EngineHost.run, "/v1/responses", body, "respond", "test")
    calls = [each for each in json.loads(answer.body)["output"] if each["type"] == "function_call"]
    assert calls
    assert json.loads(calls[0]["arguments"])["city"] in ("Oslo", "Rome")


def test_the_engine_says_its_parsers(engine: EngineProcess[Any]) -> None:
    async def names(host: EngineHost) -> dict[str, str | None]:
        return host.parsers

    assert engine.do(names) == {"tool_parser": "qwen", "reasoning_parser": ""}
