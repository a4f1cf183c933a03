"""Files that are made to hurt whoever reads them: each batch ends with its errors, in bounded memory."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.hostile.server import Role

CHAT = "/v1/chat/completions"
MODEL = "model"  # the folder's name
MIB = 1024 * 1024
GROWTH = 300 * MIB
# Their plan, of 15 million tokens, may run while they are measured. One that is tokenized as a whole takes 1,000 MiB.
GROWTH_OF_WORDS = 600 * MIB


def line(custom_id: str, content: Any, **body: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    found = {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL, "messages": messages, **body},
    }
    return json.dumps(found, ensure_ascii=False).encode() + b"\n"


def raw(body: bytes) -> bytes:
    return b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ' + body + b"}\n"


DEPTH = 1_000_000
TOOL = {"type": "function", "function": {"name": "f"}}
# What the file is, how to make it, and the code of its first error; None where it is fine.
FILES: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "lists nested": (lambda: raw(b"[" * DEPTH + b"]" * DEPTH), "invalid_json_line"),
    "objects nested": (lambda: raw(b'{"a":' * DEPTH + b"1" + b"}" * DEPTH), "invalid_json_line"),
    "messages nested": (lambda: raw(b'{"messages": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"), "invalid_json_line"),
    "cut inside": (lambda: raw(b"[" * DEPTH)[: DEPTH // 2], "invalid_json_line"),
    "a number of a million digits": (lambda: raw(b'{"messages": ' + b"9" * DEPTH + b"}"), "invalid_json_line"),
    "not UTF-8": (lambda: line("a", "?").replace(b"?", b"\xff\xfe\x80"), "invalid_encoding"),
    "half a surrogate": (lambda: line("a", "?").replace(b"?", rb"\ud800"), "invalid_json_line"),
    "zero bytes": (lambda: b"\x00" * 1000 + b"\n", "invalid_json_line"),
    "a line of 100 MB": (lambda: b"a" * (100 * MIB), "invalid_request"),
    "blank lines": (lambda: b"\n" * (50 * MIB), "too_many_tasks"),
    "as many errors as lines": (lambda: b"{}\n" * (20 * MIB), "missing_required_parameter"),
    "one id again and again": (lambda: line("a", "x") * 49_000, "duplicate_custom_id"),
    "words of 7 MB": (
        lambda: b"".join(line(str(n), "ab" * (7 * MIB // 2)) for n in range(4)),
        None,  # each fails its own line
    ),
    "tiny parts": (lambda: line("a", [{"type": "text", "text": "a"}] * 200_000), "invalid_json_line"),
    "many parts": (lambda: line("a", [{"type": "text", "text": "a"}] * 5_000), "invalid_request"),
    "tools without end": (
        lambda: line("a", "x", tools=[{"type": "function", "function": {"name": "f"}}] * 90_000),
        "invalid_json_line",
    ),
}


@pytest.fixture
def client(api: Role) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="k", max_retries=2)


def validated(client: openai.OpenAI, path: Path) -> Any:
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
    until = time.monotonic() + 60
    while batch.status == "validating" and time.monotonic() < until:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("name", FILES)
def test_file_ends_with_its_errors(client: openai.OpenAI, planner: Role, tmp_path: Path, name: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("a", "x"))
    assert validated(client, path).status == "in_progress"
    planner.forget_peak()
    before = planner.peak_rss
    content, code = FILES[name]
    path.write_bytes(content())
    batch = validated(client, path)
    if code is None:
        assert batch.status == "in_progress", batch.errors
        client.batches.cancel(batch.id)
    else:
        assert batch.status == "failed"
        assert batch.errors.data[0].code == code, batch.errors.data[0]
        assert len(batch.errors.data) <= 1000
        assert max(len(each.message) for each in batch.errors.data) < 1000
    assert planner.peak_rss - before < (GROWTH_OF_WORDS if name == "words of 7 MB" else GROWTH)
