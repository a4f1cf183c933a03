"""Knows what finds tool calls and thoughts in a model's answers: SGLang's parsers."""

from types import SimpleNamespace
from typing import Any

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.template_detection import detect_reasoning_pattern, resolve_auto_parsers
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from engine_ext.errors import EngineStartError

AUTO = "auto"
KNOWN = {"tool_call_parser": FunctionCallParser.ToolCallParserEnum, "reasoning_parser": ReasoningParser.DetectorMap}


def check(arguments: dict[str, Any]) -> None:
    """Raise EngineStartError if SGLang's arguments name a parser that it does not have."""
    for argument, known in KNOWN.items():
        if (name := arguments.get(argument)) is not None and name != AUTO and name not in known:
            raise EngineStartError(f"SGLang has no {argument} {name!r}. It has {', '.join(sorted(known))}, and 'auto'.")


def chosen(model: str, arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the tool-call parser and the reasoning parser for a model, as SGLang takes them; None for none.

    Of a template that has the marks of thoughts, but does not say when the model thinks, SGLang assumes that it always
    does. Its answers without thoughts would be empty, and no format would hold: none is taken then. Raises
    EngineStartError.
    """
    check(arguments)
    given = {"chat_template": None, "trust_remote_code": False, **dict.fromkeys(KNOWN), **arguments}
    told: Any = SimpleNamespace(**{**given, "model_path": model})
    told.override = lambda source, **found: vars(told).update(found)
    resolve_auto_parsers(told)
    thoughts = told.reasoning_parser
    if thoughts is not None and given["reasoning_parser"] == AUTO and not _says_when_it_thinks(told):
        thoughts = None
    return told.tool_call_parser, thoughts


def _says_when_it_thinks(told: Any) -> bool:
    template = getattr(get_tokenizer(told.model_path, trust_remote_code=told.trust_remote_code), "chat_template", None)
    if not isinstance(template, str):
        return True  # SGLang knows it by its architecture
    always, switch = detect_reasoning_pattern(template)
    return always or switch is not None
