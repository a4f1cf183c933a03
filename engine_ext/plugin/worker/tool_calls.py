"""Bounds what SGLang's parsers of tool calls take: some take the square of an answer's marks, and one all ways to read
them, and nothing else runs beside a regular expression.
"""

import re
from typing import Any

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.pythonic_detector import PythonicDetector

MOST = 20_000_000  # marks of an answer times its characters: a third of a second of a parser that takes their square
# With what calls and their parts begin, where the parser does not name it.
MARKS = ("<tool_call", "<function", "<param", "<invoke", "<arg_key", "<|", "[TOOL")


class Pythonic(PythonicDetector):
    """Finds a list of calls, and leaves it to Python's parser whether it is one; SGLang's pattern is exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.tool_call_regex = re.compile(r"\[\s*[a-zA-Z]\w*\(.*\)\s*\]", re.DOTALL)


def parses_soon(detector: Any, text: str) -> bool:
    """Return whether this parser reads the text within a third of a second, whatever it says."""
    named = [each.strip() for each in vars(detector).values() if isinstance(each, str) and each.strip()]
    lists = ("[",) if isinstance(detector, PythonicDetector) else ()
    most = max(text.count(mark) for mark in (*MARKS, *named, *lists))
    return most * len(text) <= MOST


def _has_tool_call(self: Any, text: str) -> bool:
    return parses_soon(self.detector, text) and _sglangs(self, text)


_sglangs = FunctionCallParser.has_tool_call


def bound() -> None:
    """Let answers that would take too long be text; SGLang parses only those that have a call."""
    FunctionCallParser.has_tool_call = _has_tool_call  # type: ignore[method-assign]
    FunctionCallParser.ToolCallParserEnum["pythonic"] = Pythonic
