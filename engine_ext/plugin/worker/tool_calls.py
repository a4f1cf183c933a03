"""Bounds what SGLang's parsers of tool calls take: some take the square of an answer's marks, and one all ways to read
them, and nothing else runs beside a regular expression.
"""

import re
from typing import Any, NamedTuple

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.pythonic_detector import PythonicDetector

MOST = 20_000_000  # marks of an answer times its characters: a third of a second of a parser that takes their square
SHORTEST = 4  # characters of a mark
# With what calls and their parts begin, where the parser does not name it.
MARKS = ("<tool_call", "<function", "<param", "<invoke", "<arg_key", "<|", "[TOOL")


class Calls(NamedTuple):
    """Where a list of calls begins and ends in a text, as a regular expression's match says it."""

    begin: int
    until: int

    def start(self) -> int:
        return self.begin

    def end(self) -> int:
        return self.until


class ListOfCalls:
    """Finds the first list that begins with a call, up to the last end of one, in the place of SGLang's pattern."""

    def search(self, text: str) -> Calls | None:
        begin, ends = _BEGIN.search(text), [each.end() for each in _END.finditer(text)]
        return Calls(begin.start(), ends[-1]) if begin and ends and begin.end() < ends[-1] else None


_BEGIN, _END = re.compile(r"\[\s*[a-zA-Z]\w*\("), re.compile(r"\)\s*\]")


class Pythonic(PythonicDetector):
    """Leaves it to Python's parser whether a list is one of calls; SGLang's pattern tries all ways to read it."""

    def __init__(self) -> None:
        super().__init__()
        self.tool_call_regex: Any = ListOfCalls()


def parses_soon(detector: Any, text: str) -> bool:
    """Return whether this parser reads the text within a third of a second, whatever it says."""
    named = [each.strip() for each in vars(detector).values() if isinstance(each, str) and _is_mark(each.strip())]
    most = max(text.count(mark) for mark in (*MARKS, *named))
    return most * len(text) <= MOST


def _is_mark(text: str) -> bool:
    """Return whether a detector's text is a mark, and no bracket or comma, of which ordinary calls have thousands."""
    return len(text) >= SHORTEST and text[0] in "<["


def _has_tool_call(self: Any, text: str) -> bool:
    return parses_soon(self.detector, text) and _sglangs(self, text)


_sglangs = FunctionCallParser.has_tool_call


def bound() -> None:
    """Let answers that would take too long be text; SGLang parses only those that have a call."""
    FunctionCallParser.has_tool_call = _has_tool_call  # type: ignore[method-assign]
    FunctionCallParser.ToolCallParserEnum["pythonic"] = Pythonic
