"""Every call of the contract by whichever `openai` is installed beside this script; needs nothing else.

`python calls.py BASE_URL MODEL` prints one JSON line for each call: its name and why it failed, if it did.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import openai

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


def lines(model: str, count: int) -> bytes:
    bodies = [
        {"model": model, "messages": [{"role": "user", "content": f"Say {n}."}], "max_tokens": 4} for n in range(count)
    ]
    return b"".join(
        json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
        for n, body in enumerate(bodies)
    )


class NoSuchCall(Exception):
    """The client is too old for it."""


def failure(call: Callable[[], object]) -> Any:
    """The error that it raises."""
    try:
        call()
    except openai.OpenAIError as error:
        return error
    raise AssertionError("no error came")


class Calls:
    def __init__(self, url: str, model: str) -> None:
        self.client: Any = openai.OpenAI(base_url=url, api_key="k", webhook_secret="whsec_" + "A" * 32)
        self.data = lines(model, 30)
        self.model = model
        self.file: Any = None
        self.batch: Any = None

    def files_create(self) -> None:
        expiry = {"anchor": "created_at", "seconds": 86400}
        self.file = self.client.files.create(file=("in.jsonl", self.data), purpose="batch", expires_after=expiry)
        assert (self.file.status, self.file.bytes) == ("processed", len(self.data))

    def files_wait_for_processing(self) -> None:
        assert self.client.files.wait_for_processing(self.file.id).status == "processed"

    def files_retrieve_list_content(self) -> None:
        assert self.client.files.retrieve(self.file.id).filename == "in.jsonl"
        assert self.file.id in [each.id for each in self.client.files.list(limit=2, purpose="batch", order="desc")]
        assert self.client.files.content(self.file.id).content == self.data

    def uploads_by_hand(self) -> None:
        begun = self.client.uploads.create(bytes=6, filename="a.jsonl", mime_type="text/jsonl", purpose="batch")
        parts = [self.client.uploads.parts.create(begun.id, data=each).id for each in (b"abc", b"def")]
        done = self.client.uploads.complete(begun.id, part_ids=parts, md5=hashlib.md5(b"abcdef").hexdigest())
        assert self.client.files.content(done.file.id).content == b"abcdef"
        assert self.client.files.delete(done.file.id).deleted

    def uploads_cancel(self) -> None:
        begun = self.client.uploads.create(bytes=6, filename="a.jsonl", mime_type="text/jsonl", purpose="batch")
        assert self.client.uploads.cancel(begun.id).status == "cancelled"

    def uploads_upload_file_chunked(self) -> None:
        done = self.client.uploads.upload_file_chunked(
            file=self.data,
            filename="in.jsonl",
            bytes=len(self.data),
            mime_type="text/jsonl",
            purpose="batch",
            part_size=1000,
        )
        assert done.file.status == "processed"

    def models_list_retrieve(self) -> None:
        assert self.model in [each.id for each in self.client.models.list()]
        assert self.client.models.retrieve(self.model).object == "model"

    def batches_create(self) -> None:
        self.batch = self.client.batches.create(
            input_file_id=self.file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"a": "b"},
            output_expires_after={"anchor": "created_at", "seconds": 86400},
        )
        assert self.batch.status in ("validating", "in_progress")

    def batches_retrieve_until_completed(self) -> None:
        deadline = time.monotonic() + 300
        while self.batch.status not in ENDED and time.monotonic() < deadline:
            time.sleep(0.3)
            self.batch = self.client.batches.retrieve(self.batch.id)
        assert self.batch.status == "completed", self.batch
        assert self.batch.request_counts.completed == 30
        assert self.batch.usage.output_tokens > 0

    def batches_output(self) -> None:
        found = [json.loads(each) for each in self.client.files.content(self.batch.output_file_id).text.splitlines()]
        assert {each["custom_id"] for each in found} == {f"id-{n}" for n in range(30)}

    def batches_list_pages(self) -> None:
        assert self.batch.id in [each.id for each in self.client.batches.list(limit=1)]

    def batches_cancel(self) -> None:
        made = self.client.batches.create(input_file_id=self.file.id, endpoint=CHAT, completion_window="24h")
        assert self.client.batches.cancel(made.id).status in ("cancelling", "cancelled")

    def errors_are_typed(self) -> None:
        create = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
        missing = failure(lambda: self.client.batches.retrieve("batch_none"))
        bad = [
            failure(lambda: self.client.batches.create(**create)),
            failure(lambda: self.client.batches.cancel(self.batch.id)),
        ]
        assert isinstance(missing, openai.NotFoundError)
        assert all(isinstance(each, openai.BadRequestError) for each in bad)
        assert all(each.request_id for each in (missing, *bad))

    def webhooks_unwrap(self) -> None:
        body = json.dumps(
            {"id": "evt_1", "object": "event", "created_at": 1, "type": "batch.completed", "data": {"id": "batch_1"}}
        )
        stamp = str(int(time.time()))
        key = base64.b64decode("A" * 32)
        signature = base64.b64encode(hmac.digest(key, f"evt_1.{stamp}.{body}".encode(), "sha256")).decode()
        headers = {"webhook-id": "evt_1", "webhook-timestamp": stamp, "webhook-signature": f"v1,{signature}"}
        assert self.client.webhooks.unwrap(body, headers).type == "batch.completed"

    def webhooks_manage(self) -> None:
        if not hasattr(self.client.webhooks, "create"):
            raise NoSuchCall("this client has no calls for it")
        made = self.client.webhooks.create(event_types=["batch.completed"], name="a", url="https://example.com/x")
        assert made.signing_secret.startswith("whsec_")
        assert self.client.webhooks.retrieve(made.id).url == "https://example.com/x"
        assert self.client.webhooks.update(made.id, name="b").name == "b"
        assert made.id in [each.id for each in self.client.webhooks.list()]
        fresh = self.client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        assert fresh.signing_secret != made.signing_secret
        assert self.client.webhooks.delete(made.id).deleted

    def online_chat(self) -> None:
        found = self.client.chat.completions.create(**self._asked())
        assert found.choices[0].message.role == "assistant"
        assert found.usage.completion_tokens == 4
        assert found._request_id

    def online_chat_stream(self) -> None:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = list(self.client.chat.completions.create(**self._asked(), **usage))
        assert all(each.object == "chat.completion.chunk" for each in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == 4

    def online_completions(self) -> None:
        asked = {"model": self.model, "prompt": ["One", "Two"], "max_tokens": 4}
        assert len(self.client.completions.create(**asked).choices) == 2
        text = [each.choices[0].index for each in self.client.completions.create(**asked, stream=True)]
        assert set(text) == {0, 1}

    def online_responses(self) -> None:
        if not hasattr(self.client, "responses"):
            raise NoSuchCall("this client has no calls for it")
        asked = {"model": self.model, "input": "Name a colour.", "max_output_tokens": 4, "temperature": 0}
        whole = self.client.responses.create(**asked)
        assert (whole.status, whole.usage.output_tokens) == ("incomplete", 4)
        first, *events, last = list(self.client.responses.create(**asked, stream=True))
        assert (first.type, last.type) == ("response.created", "response.incomplete")
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        assert last.response.usage.output_tokens == 4

    def online_service_tiers(self) -> None:
        for asked, given in (("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "default")):
            body = {**self._asked(), "service_tier": asked}
            assert self.client.chat.completions.create(**body).service_tier == given, asked
            assert {each.service_tier for each in self.client.chat.completions.create(**body, stream=True)} == {given}

    def online_tools(self) -> None:
        function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
        body = {**self._asked(), "tools": [{"type": "function", "function": function}], "tool_choice": "none"}
        assert self.client.chat.completions.create(**body).choices[0].message.content
        assert list(self.client.chat.completions.create(**body, stream=True))

    def online_async(self) -> None:
        async def ask() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=str(self.client.base_url), api_key="k") as client:
                stream: Any = await client.chat.completions.create(**self._asked(), stream=True)
                whole: Any = await client.chat.completions.create(**self._asked())
                return [
                    whole.choices[0].message.content,
                    "".join([each.choices[0].delta.content or "" async for each in stream]),
                ]

        whole, streamed = asyncio.run(ask())
        assert whole == streamed

    def online_errors_are_typed(self) -> None:
        create = self.client.chat.completions.create
        unknown = failure(lambda: create(**{**self._asked(), "model": "unknown"}))
        bad = failure(lambda: create(**{**self._asked(), "temperature": 1e-9}, stream=True))
        assert isinstance(unknown, openai.NotFoundError)
        assert isinstance(bad, openai.BadRequestError)
        assert all(each.request_id for each in (unknown, bad))

    def _asked(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Name a colour."}]
        return {"model": self.model, "messages": messages, "max_tokens": 4, "temperature": 0}

    def files_delete(self) -> None:
        assert self.client.files.delete(self.batch.output_file_id).deleted


def main() -> None:
    calls = Calls(sys.argv[1], sys.argv[2])
    names = [name for name in vars(Calls) if not name.startswith("_")]
    for name in names:
        method: Callable[[], None] = getattr(calls, name)
        try:
            method()
            said = "ok"
        except NoSuchCall as error:
            said = f"- {error}"
        except Exception:
            said = traceback.format_exc().strip().splitlines()[-1]
        print(json.dumps({"call": name, "said": said}), flush=True)


if __name__ == "__main__":
    main()
