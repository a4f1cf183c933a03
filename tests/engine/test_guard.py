"""Which media a request may name: parts of a message are read by the engine, the rest of it is text."""

from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

from engine_ext.plugin.worker.guard import fault

URL = "http://10.0.0.1/x"
CALL = {"id": "1", "type": "function", "function": {"name": "fetch", "arguments": {"url": URL}}}


def chat(*parts: dict[str, Any], **fields: Any) -> Any:
    message = {"role": "user", "content": list(parts) or "x", **fields}
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [message]})


def response(part: dict[str, Any]) -> Any:
    given = [{"role": "user", "content": [part]}]
    return ResponsesRequest.model_construct(model="m", input=given)


@pytest.mark.parametrize(
    "request_",
    [
        chat({"type": "image_url", "image_url": {"url": URL}}),
        chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        chat({"type": "text", "text": "x"}, {"type": "audio_url", "audio_url": {"url": URL}}),
        response({"type": "input_image", "image_url": URL}),
        response({"type": "input_file", "file_url": URL}),
    ],
)
def test_media_from_elsewhere_is_refused(request_: Any) -> None:
    found = fault(request_, 100)
    assert found is not None
    assert found[0] in ("messages", "input")


@pytest.mark.parametrize(
    "request_",
    [
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}),
        chat({"type": "text", "text": URL}),
        chat(role="assistant", tool_calls=[CALL]),
        response({"type": "input_image", "image_url": "data:image/png;base64,AA=="}),
    ],
)
def test_what_brings_its_media_or_is_text_may_pass(request_: Any) -> None:
    assert fault(request_, 100) is None
