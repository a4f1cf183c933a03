"""No answer, however its calls begin, holds its parser for long; one with calls is parsed as SGLang does it."""

import time
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from engine_ext.plugin.worker.tool_calls import bound

TOOL = Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}})
MANY = [
    mark * 16_000 for mark in ("<tool_call>", "<tool_call>\n", "<function=a>", "<|tool_call>", "[a(b=1, ", "<param")
]


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FunctionCallParser, "has_tool_call", FunctionCallParser.has_tool_call)
    monkeypatch.setitem(
        FunctionCallParser.ToolCallParserEnum, "pythonic", FunctionCallParser.ToolCallParserEnum["pythonic"]
    )
    bound()


def parsed(name: str, text: str) -> Any:
    parser = FunctionCallParser([TOOL], name)
    return parser.parse_non_stream(text)[1] if parser.has_tool_call(text) else []


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen", "hermes", "mimo", "glm47", "minicpm5", "hunyuan", "pythonic"])
def test_many_marks_are_text(name: str) -> None:
    started = time.process_time()
    for text in (*MANY, "[" + "a(b=1, " * 20, ")]" + "[a(b=1, " * 16_000):
        parsed(name, text)
    assert time.process_time() - started < 30  # of each, some would take minutes, and the last one for pythonic days


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "Yes: [add(a=1, b='x'), add(a=[2])]"),
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {{"a": {[[1, 2]] * 3000}}}}}\n</tool_call>' * 2),
        ("qwen", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' * 2),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>" * 2),
    ],
)
def test_calls_are_found(name: str, text: str) -> None:
    assert [call.name for call in parsed(name, text)] == ["add", "add"]
