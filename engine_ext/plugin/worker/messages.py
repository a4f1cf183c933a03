"""Says in words what is wrong with messages that SGLang's models refuse, which would list all that they might be."""

from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
URLS = ("image_url", "video_url", "audio_url")
PARTS = ("text", *URLS)
OBJECTS = ("response_format", "logit_bias", "chat_template_kwargs", "reasoning", "text", "metadata", "stream_options")
LISTS = ("tools", "stop_token_ids")
Fault = tuple[str, str]  # the field, and what is wrong


def fault_of(fields: dict[str, Any]) -> Fault | None:
    """Return the first fault of a body's shape, or None if this knows of no fault."""
    if "messages" in fields and (fault := fault_in("messages", fields["messages"])):
        return fault
    for names, kind, what in ((OBJECTS, dict, "an object"), (LISTS, list, "a list")):
        for name in names:
            if name in fields and not isinstance(fields[name], kind):
                return name, f"must be {what}"
    return None


def fault_in(name: str, messages: Any) -> Fault | None:
    """Return the first fault in the messages of the field `name`, or None if this knows of no fault."""
    if not isinstance(messages, list):
        return name, "must be a list of messages"
    return next((fault for at, each in enumerate(messages) if (fault := _message(f"{name}.{at}", each))), None)


def _message(name: str, message: Any) -> Fault | None:
    if not isinstance(message, dict):
        return name, "must be an object with a role and a content"
    if message.get("role") not in (*ROLES, "function", "latest_reminder"):
        return f"{name}.role", f"must be one of {_listed(ROLES)}"
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        return f"{name}.content", "is missing"
    if not isinstance(content, str | list | None):
        return f"{name}.content", "must be text, or a list of parts"
    parts = content if isinstance(content, list) else []
    return next((fault for at, each in enumerate(parts) if (fault := _part(f"{name}.content.{at}", each))), None)


def _part(name: str, part: Any) -> Fault | None:
    if not isinstance(part, dict):
        return name, "must be an object with a type"
    kind = part.get("type")
    if kind not in (*PARTS, "thinking", "reasoning", "tool_reference"):
        return f"{name}.type", f"must be one of {_listed(PARTS)}"
    if kind == "text" and not isinstance(part.get("text"), str):
        return f"{name}.text", "must be text"
    given = part.get(kind) if kind in URLS else None
    if kind in URLS and not (isinstance(given, dict) and isinstance(given.get("url"), str)):
        return f"{name}.{kind}", "must be an object with a url"
    return None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{each}'" for each in names[:-1]) + f" or '{names[-1]}'"
