"""Lets a body mean to SGLang what it means to OpenAI's API, and refuses what SGLang would answer without it."""

import json
from typing import Any

import msgspec

from engine_ext.plugin.worker import guard

Fault = tuple[str, str]  # the field, and why it is refused
TEXTS = ("input_text", "output_text", "text", "refusal")  # parts that are text; the last one under its own name
PROMPTS = ("messages", "prompt", "input", "query", "items", "documents")
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
# What only OpenAI's own servers have: an answer without it would be another one.
ELSEWHERE = {
    RESPONSES: ("background", "previous_response_id", "conversation", "prompt"),
    CHAT: ("web_search_options", "functions", "audio"),
}


def plain(endpoint: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body as SGLang should read it.

    OpenAI's schema allows null for what is left out, an empty `stop`, and `top_p` 0, which is greedy; histories may
    have calls whose arguments are no JSON, and answers of /v1/responses come back as input.
    """
    found = guard.own_space({name: value for name, value in fields.items() if value is not None})
    for name in ("stop", "stop_regex"):
        given = found.get(name)
        kept = [each for each in given if each != ""] if isinstance(given, list) else given
        if name in found and kept in ("", []):
            del found[name]
        elif name in found:
            found[name] = kept
    if found.get("top_p") == 0 and not isinstance(found["top_p"], bool):
        found |= {"top_p": 1.0, "temperature": 0.0}
    if isinstance(found.get("tools"), list):
        found["tools"] = [_without_null_strict(each) for each in found["tools"]]
    if isinstance(found.get("messages"), list):
        found["messages"] = [_message(each) for each in found["messages"]]
    if endpoint == RESPONSES and isinstance(found.get("input"), list):
        found["input"] = [_item(each) for each in found["input"]]
    return found


def unserved(endpoint: str, fields: dict[str, Any]) -> Fault | None:
    """Return the first field of a plain body that is empty, or would be ignored though the answer depends on it.

    The reason comes with it.
    """
    for name in PROMPTS:
        if fields.get(name) in ("", []):
            return name, "must not be empty"
    for name in ELSEWHERE.get(endpoint, ()):
        if fields.get(name) not in (None, False, "", []):
            return name, "not supported"
    if endpoint == CHAT and any(each != "text" for each in _list(fields.get("modalities"))):
        return "modalities", "only 'text' is supported"
    for at, tool in enumerate(_list(fields.get("tools")) if endpoint in (RESPONSES, CHAT) else []):
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind != "function":
            return f"tools.{at}.type", f"{str(kind)[:40]!r} is not supported: only functions are, which the client runs"
    for at, item in enumerate(_list(fields.get("input")) if endpoint == RESPONSES else []):
        if isinstance(item, dict) and isinstance(item.get("output"), list):
            return f"input.{at}.output", "must be text, or parts of text"
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _without_null_strict(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    found = {name: value for name, value in tool.items() if name != "strict" or value is not None}
    return (
        found | {"function": _without_null_strict(found["function"])}
        if isinstance(found.get("function"), dict)
        else found
    )


def _message(message: Any) -> Any:
    """Return a chat's message whose calls have objects as arguments, and whose refusals are text."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    found = dict(message)
    if isinstance(found.get("content"), list):
        found["content"] = [
            {"type": "text", "text": part["refusal"]} if _text_of(part) and part["type"] == "refusal" else part
            for part in found["content"]
        ]
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_call(each) for each in found["tool_calls"]]
    return found


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _arguments(given: Any) -> Any:
    """Return a call's arguments as the text of an object: templates iterate over them."""
    if isinstance(given, str):
        try:
            is_object = isinstance(msgspec.json.decode(given), dict)
        except (msgspec.DecodeError, RecursionError):
            is_object = False
        if is_object:
            return given
    if isinstance(given, dict):
        return json.dumps(given)
    return json.dumps({"arguments": given}) if given not in (None, "") else "{}"


def _item(item: Any) -> Any:
    """Return an item of a response's input, also one that was the output of another response."""
    if not isinstance(item, dict):
        return item
    found = {name: value for name, value in item.items() if value is not None}
    if isinstance(found.get("output"), list) and all(map(_text_of, found["output"])):
        found["output"] = " ".join(part["text"] for part in found["output"] if part["type"] != "refusal")
    if isinstance(found.get("content"), list):
        found["content"] = [
            {"type": "output_text", "text": part["refusal"]} if _text_of(part) and part["type"] == "refusal" else part
            for part in found["content"]
        ]
    return found


def _text_of(part: Any) -> bool:
    """Return whether a part is text."""
    if not isinstance(part, dict) or part.get("type") not in TEXTS:
        return False
    return isinstance(part.get("refusal" if part["type"] == "refusal" else "text"), str)
