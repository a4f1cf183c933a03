"""Shows a request and its answer as people read them: turns of a conversation, pictures, JSON with its indentation.

Bodies are clients' and engines' texts: whatever has another form than the API's is left to the raw JSON below.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from service.objects.shards import Outcome, Usage
from service.worker.answer_body import Body, read, usage_of
from service.worker.judge import is_valid, outcome_of
from service.worker.tries import NOT_ACCEPTED

MOST_CHARACTERS = 20_000  # shown of one text
MOST_TURNS = 200
MOST_IMAGES = 16
IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. `is_json`: the text is JSON, indented here. `images`: their data, as URLs."""

    role: str
    text: str
    is_json: bool = False
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer is worth, in words and as the class of its colour, and its tokens.

    `tries`: how many answers there were; `spent`: the output tokens of those before it.
    """

    word: str
    colour: str
    usage: Usage
    tries: int = 1
    spent: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request and its answer as people read them, and as JSON. `said`: what the answer says, to copy it."""

    turns: list[Turn]
    verdict: Verdict | None
    said: str
    raw: list[tuple[str, str]]


def conversation_of(
    request: dict[str, Any] | str | None, answer: dict[str, Any] | str | None, ok: bool, noted: Outcome | None
) -> Conversation:
    """Return what is shown of a request and its answer, given as their lines, or as text where they are no objects."""
    asks = _dict(_dict(request).get("body"))
    line = answer if isinstance(answer, dict) else None
    says = answered(_dict(_dict(_dict(line).get("response")).get("body")))
    if line and not ok and isinstance(_dict(line.get("error")).get("message"), str):
        says.append(Turn("error", line["error"]["message"]))
    raw = [("Request", request), ("Answer", answer)]
    return Conversation(
        list(_bounded([*asked(asks), *says])),
        None if line is None else verdict(asks, line, ok, noted),
        "\n".join(turn.text for turn in says if turn.role.startswith("answer")),
        [(name, _written(each)) for name, each in raw if each],
    )


def verdict(request: dict[str, Any], line: dict[str, Any], ok: bool, noted: Outcome | None = None) -> Verdict:
    """Judge a line of a result file. `request`: the body of its request, or nothing where it is not known.

    `noted`: its outcome, if the batch has noted it.
    """
    response = _dict(line.get("response"))
    body = _dict(response.get("body"))
    told = _dict(body.get("usage"))
    spent = _dict(told.get("not_accepted")).get("output_tokens")
    both = (_count(told.get("tries")) or 1, _count(spent))
    try:
        found = read(json.dumps(body).encode())
    except msgspec.DecodeError:  # of an engine with answers of its own
        found = Body()
    usage = usage_of(found)
    if not ok:
        code = _dict(line.get("error")).get("code") or response.get("status_code") or "unknown"
        return Verdict("not accepted" if code == NOT_ACCEPTED else f"failed: {code}", "bad", usage, *both)
    word, colour = _worth(request, found, usage, noted)
    return Verdict(word, colour, usage, *both)


def _worth(request: dict[str, Any], found: Body, usage: Usage, noted: Outcome | None) -> tuple[str, str]:
    match outcome_of(request, found) if noted is None else noted:
        case Outcome.CUT_OFF:
            return f"cut off at {usage.output:,} tokens", "care"
        case Outcome.LOOPED:
            return f"looped until cut off at {usage.output:,} tokens", "care"
        case Outcome.INVALID:
            return "not the JSON that was asked for", "care"
        case Outcome.REFUSED:
            return "refused", "care"
        case _:
            return "valid by its schema" if is_valid(request, found) else "answered", "completed"


def _count(found: Any) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def beginning(turns: list[Turn], length: int) -> str:
    """Return the beginning of the last of these turns that says something."""
    return next((turn.text for turn in reversed(turns) if turn.text), "")[:length]


def _bounded(turns: list[Turn]) -> Iterator[Turn]:
    """Yield the turns as they are shown: not too many, not too long, and JSON indented."""
    for turn in turns[:MOST_TURNS]:
        found = _json(turn.text) if turn.text.lstrip()[:1] in ("{", "[") else None
        text, is_json = (turn.text, turn.is_json) if found is None else (_written(found), True)
        more = f"\n… {len(text) - MOST_CHARACTERS:,} more characters" if len(text) > MOST_CHARACTERS else ""
        yield Turn(turn.role, text[:MOST_CHARACTERS] + more, is_json, turn.images[:MOST_IMAGES])
    if len(turns) > MOST_TURNS:
        yield Turn("", f"Only the first {MOST_TURNS} turns are shown.")


def _json(text: str) -> Any:
    """Return what a text is as JSON; None if it is none, or would be shown as another one than it is."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refused, parse_float=_as_written)
    except (ValueError, RecursionError):
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(constant)


def _as_written(digits: str) -> float:
    if repr(float(digits)) != digits:
        raise ValueError(digits)
    return float(digits)


def asked(body: dict[str, Any]) -> list[Turn]:
    """Return the turns of a request of any endpoint."""
    return list(_asked(body))


def answered(body: dict[str, Any]) -> list[Turn]:
    """Return the turns of an engine's answer."""
    return list(_answered(body))


def _asked(body: dict[str, Any]) -> Iterator[Turn]:
    if isinstance(body.get("instructions"), str):
        yield Turn("system", body["instructions"])
    for message in _list(body.get("messages")):
        yield from _message(_dict(message), "user")
    for name in ("prompt", "input", "query"):
        given = body.get(name)
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, str):
                yield Turn("user" if name == "input" else name, each)
            elif isinstance(each, dict):
                yield from _item(each, "user")
    for name in ("items", "documents"):
        for number, each in enumerate(_list(body.get(name)), 1):
            yield Turn(f"{name[:-1]} {number}", each if isinstance(each, str) else _written(each))


def _answered(body: dict[str, Any]) -> Iterator[Turn]:
    choices = _list(body.get("choices"))
    for number, choice in enumerate(map(_dict, choices), 1):
        role = f"answer {number}" if len(choices) > 1 else "answer"
        if isinstance(choice.get("text"), str):
            yield Turn(role, choice["text"])
        yield from _message({**_dict(choice.get("message")), "role": role}, role)
    for item in _list(body.get("output")):
        yield from _item(_dict(item), "answer")
    rows = _list(body.get("data"))
    if rows:
        yield Turn("answer", f"{len(rows):,} vectors of {len(_list(_dict(rows[0]).get('embedding'))):,} numbers")
    for name in ("results", "scores"):
        if body.get(name):
            yield Turn("answer", _written(body[name]), is_json=True)
    if isinstance(_dict(body.get("error")).get("message"), str):
        yield Turn("error", body["error"]["message"])


def _message(message: dict[str, Any], role: str) -> Iterator[Turn]:
    role = message["role"] if isinstance(message.get("role"), str) else role
    if isinstance(message.get("reasoning_content"), str) and message["reasoning_content"]:
        yield Turn("reasoning", message["reasoning_content"])
    text, images = _content(message.get("content"))
    if text or images:
        yield Turn(role, text, images=images)
    if isinstance(message.get("refusal"), str):
        yield Turn(f"{role} refuses", message["refusal"])
    for call in map(_dict, _list(message.get("tool_calls"))):
        yield from _call(_dict(call.get("function")))


def _item(item: dict[str, Any], role: str) -> Iterator[Turn]:
    """Yield the turns of an item of a response's input or output."""
    match item.get("type", "message"):
        case "message":
            yield from _message({**item, "role": item.get("role") if role == "user" else role}, role)
        case "function_call":
            yield from _call(item)
        case "function_call_output":
            yield Turn("tool", str(item.get("output", "")))
        case "reasoning":
            yield Turn("reasoning", _content(item.get("content") or item.get("summary"))[0])
        case _:
            yield Turn(str(item.get("type")), _written(item), is_json=True)


def _call(function: dict[str, Any]) -> Iterator[Turn]:
    yield Turn(f"calls {function.get('name')}", str(function.get("arguments") or ""))


def _content(content: Any) -> tuple[str, tuple[str, ...]]:
    """Return the text of a message's content, and its images, as far as they are in the request itself."""
    if isinstance(content, str):
        return content, ()
    texts, images = list[str](), list[str]()
    for part in map(_dict, _list(content)):
        given = part.get("image_url")
        url = _dict(given).get("url") if isinstance(given, dict) else given
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(url, str) and IMAGE.fullmatch(url):
            images.append(url)
        elif isinstance(url, str):
            texts.append(f"[image: {url[:200]}]")
        else:
            texts.append(f"[{part.get('type', 'part')}]")
    return "\n".join(texts), tuple(images)


def _written(value: Any) -> str:
    """Return a value as indented JSON, or the beginning of it: indentation may be a thousand times as long as it."""
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    found, length = list[str](), 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        found.append(part[:MOST_CHARACTERS])
        length += len(part)
        if length > MOST_CHARACTERS:
            return "".join(found)[:MOST_CHARACTERS] + "\n…"
    return "".join(found)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
