"""Knows what finds tool calls and reasoning in a model's answers: SGLang's parsers."""

from pathlib import Path
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

    Of a template with marks of reasoning that does not say when the model reasons, SGLang assumes that it always
    does. Answers without reasoning would be empty, and no format would hold: no parser is taken then. Raises
    EngineStartError.
    """
    check(arguments)
    given = {"chat_template": None, "trust_remote_code": False, **dict.fromkeys(KNOWN), **arguments}
    told: Any = SimpleNamespace(**{**given, "model_path": model})
    told.override = lambda source, **found: vars(told).update(found)
    resolve_auto_parsers(told)
    if given["reasoning_parser"] == AUTO and told.reasoning_parser is not None and not _says_when_it_reasons(told):
        told.reasoning_parser = None
    return told.tool_call_parser, told.reasoning_parser


def _says_when_it_reasons(told: Any) -> bool:
    """Return whether the chat template says that the model always reasons, or has a switch for it."""
    template = told.chat_template
    if template is None:
        try:
            tokenizer = get_tokenizer(told.model_path, trust_remote_code=told.trust_remote_code)
        except Exception:  # SGLang went by the model's architecture
            return True
        template = getattr(tokenizer, "chat_template", None)
    elif Path(template).is_file():
        template = Path(template).read_text()
    if not isinstance(template, str):
        return True  # by the architecture, too
    always, switch = detect_reasoning_pattern(template)
    return always or switch is not None
