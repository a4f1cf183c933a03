"""Which media a request may name: parts of a message are read by the engine, the rest of it is text."""

import base64
import io
import zlib
from typing import Any

import pytest
from PIL import Image
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

from engine_ext.plugin.worker.guard import fault

URL = "http://10.0.0.1/x"
MP4, OGG, MP3 = b"\0\0\0\x18ftypmp42" + bytes(80), b"OggS\0\x02" + bytes(80), b"\xff\xfb\x90\x64" + bytes(80)
WEBM = b"\x1a\x45\xdf\xa3\x01\0\0\0\0\0\0\x1fB\x86\x81\x01"
TAGGED = b"ID3\x03\0\0\0\0\0\x05title"
SDP = b"\nc=IN IP4 10.0.0.1\nm=audio 5000 RTP/AVP 0\n"
MANIFEST = b'<MPD profiles="urn:mpeg:dash:profile:isoff-live:2011"><BaseURL>http://10.0.0.1/</BaseURL></MPD>\0'
CALL = {"id": "1", "type": "function", "function": {"name": "fetch", "arguments": {"url": URL}}}


def picture(width: int, height: int) -> bytes:
    """A PNG whose header says so; its pixels would follow."""
    made = io.BytesIO()
    Image.new("1", (2, 2)).save(made, "PNG")
    found = bytearray(made.getvalue())
    found[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    found[29:33] = zlib.crc32(found[12:29]).to_bytes(4, "big")
    return bytes(found)


def data(given: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(given).decode()}"


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
        chat({"type": "image_url", "image_url": {"url": data(picture(2, 2))}}),
        chat({"type": "text", "text": URL}),
        chat(role="assistant", tool_calls=[CALL]),
        response({"type": "input_image", "image_url": data(picture(2, 2))}),
    ],
)
def test_what_brings_its_media_or_is_text_may_pass(request_: Any) -> None:
    assert fault(request_, 100) is None


@pytest.mark.parametrize("kind", ["video_url", "audio_url"])
@pytest.mark.parametrize("given", [MP4, OGG, MP3, WEBM, TAGGED + MP3, b"RIFF\x24\x08\0\0WAVEfmt ", b"fLaC\0\0\0\x22"])
def test_recordings_may_pass(kind: str, given: bytes) -> None:
    assert fault(chat({"type": kind, kind: {"url": data(given)}}), 100) is None


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
@pytest.mark.parametrize(
    "given",
    [
        MANIFEST,
        TAGGED + MANIFEST,
        b"#EXTM3U\n#EXTINF:1,\nhttp://10.0.0.1/\n\0",
        b"ffconcat version 1.0\nfile http://10.0.0.1/\n\0",
        SDP + b"\0",
        b"OggS" + SDP + b" " * 64 + b"\0",
        b"\xff\xfb" + SDP + b" " * 64 + b"\0",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n\0",
        b"",
    ],
)
def test_what_would_be_a_playlist_is_refused(kind: str, given: bytes) -> None:
    """FFmpeg fetches what some of these name, whatever the URL says that they are."""
    found = fault(chat({"type": kind, kind: {"url": data(given)}}), 100)
    assert found is not None
    assert "neither a picture" in found[1]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([(8_000, 6_000)] * 3, None),
        ([(13_368, 13_368)], "may have 50,000,000"),
        ([(60_000, 60_000)], "may have 50,000,000"),
        ([(8_000, 6_000)] * 4, "together"),
        ([(100, 100)] * 300, None),
    ],
)
def test_pictures_are_judged_by_their_pixels(sizes: list[tuple[int, int]], said: str | None) -> None:
    """29 KB of one colour become half a gigabyte, in the process of all requests."""
    found = fault(chat(*({"type": "image_url", "image_url": {"url": data(picture(*size))}} for size in sizes)), 100)
    assert (found is None) == (said is None)
    assert (said or "") in (found or ("", ""))[1]


@pytest.mark.parametrize("url", ["data:image/png;base64,!!!", "data:image/png;base64", "DATA:image/png;base64,AA=="])
def test_a_url_without_data_is_refused(url: str) -> None:
    assert fault(chat({"type": "image_url", "image_url": {"url": url}}), 100) is not None
