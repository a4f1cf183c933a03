"""The bodies of a scripted engine's answers, whole and as events; the fields are those of OpenAI's API."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
DIMENSIONS = 8  # of an embedding, unless the request says how many
MOST_DIMENSIONS = 8192
MOST_CHOICES = 128
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def prompts_of(endpoint: str, body: dict[str, Any]) -> list[str]:
    """Return the texts that a request asks about: its last message, or each of its prompts or inputs."""
    if endpoint == CHAT:
        return [_text(body["messages"][-1].get("content"))]
    given = body["prompt"] if endpoint == COMPLETIONS else body["input"]
    if endpoint == RESPONSES:
        last = given[-1] if isinstance(given, list) else {"content": given}
        return [_text(last.get("output", last.get("content")))]
    is_list = isinstance(given, list) and not (given and isinstance(given[0], int))
    return [_text(each) for each in given] if is_list else [_text(given)]


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts, or of a list of token ids."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return " ".join(str(part["text"]) for part in content if "text" in part)
    return content if isinstance(content, str) else json.dumps(content)


def words_of(template: str, prompt: str, body: dict[str, Any]) -> tuple[list[str], str]:
    """Return the words of an answer, a word being a token, and why it ends: `stop`, or `length` if it is cut off."""
    values = {"prompt": prompt, "model": str(body.get("model", ""))}
    text = re.sub(r"\{(prompt|model)\}", lambda found: values[found[1]], template)
    stop = body.get("stop") or []
    for each in [stop] if isinstance(stop, str) else stop:
        text = text.partition(each)[0] if each else text
    words = text.split(" ")
    most = next((int(body[name]) for name in LIMITS if body.get(name) is not None), len(words))
    return (words, "stop") if len(words) <= most else (words[:most], "length")


def whole(endpoint: str, body: dict[str, Any], rid: str, answers: list[tuple[list[str], str]]) -> dict[str, Any]:
    """Return a whole answer. `answers`: words and finish reason for each prompt of the request."""
    prompts = prompts_of(endpoint, body)
    tokens = sum(len(prompt.split(" ")) for prompt in prompts)
    model = body.get("model")
    if endpoint == EMBEDDINGS:
        rows = [{"object": "embedding", "index": k, "embedding": _vector(each, body)} for k, each in enumerate(prompts)]
        return {
            "object": "list",
            "data": rows,
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    if endpoint == RESPONSES:
        [(words, reason)] = answers
        return _response(body, rid, " ".join(words), reason, tokens, len(words))
    choices = [
        {"index": index, **_said(endpoint, " ".join(words)), "finish_reason": reason}
        for index, (words, reason) in enumerate(each for each in answers for _ in range(choices_of(body)))
    ]
    written = choices_of(body) * sum(len(words) for words, _ in answers)
    about = {"id": rid, "object": "chat.completion" if endpoint == CHAT else "text_completion"}
    return {**about, "created": int(time.time()), "model": model, "choices": choices, "usage": _usage(tokens, written)}


def choices_of(body: dict[str, Any]) -> int:
    """Return how many answers a request wants to each prompt."""
    return min(max(int(body.get("n") or 1), 1), MOST_CHOICES)


def _said(endpoint: str, text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} if endpoint == CHAT else {"text": text}


def _usage(tokens: int, written: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    return {"prompt_tokens": tokens, "completion_tokens": written, "total_tokens": tokens + written, **details}


def _response(body: dict[str, Any], rid: str, text: str, reason: str, tokens: int, written: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    is_whole = reason == "stop"
    status = "completed" if is_whole else "incomplete"
    message = {"type": "message", "id": f"msg_{rid}", "role": "assistant", "status": status, "content": [part]}
    because = {"length": "max_output_tokens"}.get(reason, reason)
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + written,
    }
    return {
        "id": rid,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model"),
        "status": status,
        "incomplete_details": None if is_whole else {"reason": because},
        "error": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "output": [message],
        "usage": usage,
    }


def _vector(text: str, body: dict[str, Any]) -> list[float] | str:
    """Return a unit vector that only the text decides."""
    size = min(max(int(body.get("dimensions") or DIMENSIONS), 1), MOST_DIMENSIONS)
    seed = int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8])
    found = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    found /= np.linalg.norm(found)
    return base64.b64encode(found.tobytes()).decode() if body.get("encoding_format") == "base64" else found.tolist()


def events(
    endpoint: str, body: dict[str, Any], rid: str, answers: list[tuple[list[str], str]], tier: str, device: str
) -> Iterator[tuple[bytes, bool]]:
    """Yield the server-sent events of an answer, and whether each brings a word. `answers`: as in `whole`."""
    about = {"service_tier": tier, "device": device}
    if endpoint == RESPONSES:
        [(words, reason)] = answers
        yield from _response_events(body, rid, words, reason, about)
        return
    about |= {"id": rid, "object": "chat.completion.chunk" if endpoint == CHAT else "text_completion"}
    about |= {"created": int(time.time()), "model": body.get("model")}

    def chunk(index: int, text: str | None, ends: str | None, is_first: bool = False) -> bytes:
        delta = {} if text is None else {**({"role": "assistant"} if is_first else {}), "content": text}
        choice = {"index": index, **({"delta": delta} if endpoint == CHAT else {"text": text or ""})}
        return _event({**about, "choices": [{**choice, "finish_reason": ends}]})

    for index, (words, reason) in enumerate(each for each in answers for _ in range(choices_of(body))):
        for number, word in enumerate(words):
            yield chunk(index, f" {word}" if number else word, None, number == 0), True
        yield chunk(index, None, reason), False
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**about, "choices": [], "usage": whole(endpoint, body, rid, answers)["usage"]}), False
    yield b"data: [DONE]\n\n", False


def _response_events(
    body: dict[str, Any], rid: str, words: list[str], reason: str, about: dict[str, Any]
) -> Iterator[tuple[bytes, bool]]:
    last = {**about, **whole(RESPONSES, body, rid, [(words, reason)])}
    first = {**last, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    [item] = last["output"]
    [part] = item["content"]
    place, where = {"output_index": 0}, {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = {**item, "status": "in_progress", "content": []}
    said: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": first})]
    said.append(("response.output_item.added", {**place, "item": begun}))
    said.append(("response.content_part.added", {**where, "part": {**part, "text": ""}}))
    for number, word in enumerate(words):
        said.append(("response.output_text.delta", {**where, "delta": f" {word}" if number else word, "logprobs": []}))
    said.append(("response.output_text.done", {**where, "text": part["text"], "logprobs": []}))
    said.append(("response.content_part.done", {**where, "part": part}))
    said.append(("response.output_item.done", {**place, "item": item}))
    said.append((f"response.{last['status']}", {"response": last}))
    for number, (kind, fields) in enumerate(said):
        event = _event({"type": kind, "sequence_number": number, **fields})
        yield f"event: {kind}\n".encode() + event, kind.endswith("delta")


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"
