"""Knows what finds tool calls and thoughts in a model's answers: SGLang's parsers."""

from types import SimpleNamespace
from typing import Any

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.template_detection import resolve_auto_parsers

from engine_ext.errors import EngineStartError

AUTO = "auto"
KNOWN = {"tool_call_parser": FunctionCallParser.ToolCallParserEnum, "reasoning_parser": ReasoningParser.DetectorMap}


def check(arguments: dict[str, Any]) -> None:
    """Raise EngineStartError if SGLang's arguments name a parser that it does not have."""
    for argument, known in KNOWN.items():
        if (name := arguments.get(argument)) is not None and name != AUTO and name not in known:
            raise EngineStartError(f"SGLang has no {argument} {name!r}. It has {', '.join(sorted(known))}, and 'auto'.")


def chosen(model: str, arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the tool-call parser and the reasoning parser that SGLang takes for a model; None for none.

    Raises EngineStartError.
    """
    check(arguments)
    given = {"chat_template": None, "trust_remote_code": False, **dict.fromkeys(KNOWN), **arguments}
    told: Any = SimpleNamespace(**given, model_path=model)
    told.override = lambda source, **found: vars(told).update(found)
    resolve_auto_parsers(told)
    return told.tool_call_parser, told.reasoning_parser
