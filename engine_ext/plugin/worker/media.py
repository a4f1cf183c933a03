"""Refuses media that a message must not bring: a batch must not explore our network, nor fill the worker's memory.

SGLang decodes all pictures of a request before it looks at its length, and hands recordings to FFmpeg, which chooses
what reads them by their content: a playlist in a data: URL makes it fetch what the playlist names.
"""

import base64
import binascii
import io
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel

MEDIA = ("image_url", "video_url", "audio_url", "file_url", "url")
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
MOST_PIXELS = 50_000_000  # of a picture: 150 MB of memory
MOST_PIXELS_TOGETHER = 3 * MOST_PIXELS  # of all pictures of a request
# Bytes at the beginning of a recording of which one must be zero. FFmpeg looks for playlists and sessions in text up to
# the first zero byte, so no text may pass that only begins like a recording.
BINARY_WITHIN = 64
KINDS = "a picture (PNG, JPEG, GIF, WebP, BMP, TIFF) or a recording (MP4, WebM, WAV, AVI, Ogg, FLAC, MP3)"


def media_fault(messages: Any) -> str | None:
    """Return why a part of these messages must not reach the engine; None if all may.

    Everything else in a message, such as the arguments of a tool call, is text to the engine.
    """
    pixels = 0
    for url in _urls(messages):
        head, comma, encoded = url.partition(",")
        if not head.startswith("data:") or not comma:
            return "media must be part of the request, as a data: URL"
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return "a data: URL is not valid base64"
        size = _pixels(data)
        if size is None and not _is_recording(data):
            return f"a data: URL is neither {KINDS}"
        pixels += size or 0
        if (size or 0) > MOST_PIXELS:
            return f"a picture has {size:,} pixels, and may have {MOST_PIXELS:,}"
        if pixels > MOST_PIXELS_TOGETHER:
            return f"the pictures have more than {MOST_PIXELS_TOGETHER:,} pixels together"
    return None


def _urls(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
        for part in content if isinstance(content, list) else []:
            yield from _urls_in(part.model_dump() if isinstance(part, BaseModel) else part)


def _urls_in(part: Any) -> Iterator[str]:
    """Yield each URL in a part, of any shape."""
    for key, value in part.items() if isinstance(part, dict) else ():
        if key in MEDIA and isinstance(value, str):
            yield value
        else:
            yield from _urls_in(value)


def _pixels(data: bytes) -> int | None:
    """Return how many pixels a picture has, by its header; None for what is no picture."""
    try:
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),
            Image.open(io.BytesIO(data), formats=FORMATS) as picture,
        ):
            return picture.width * picture.height
    except Image.DecompressionBombError:
        return 2 * (Image.MAX_IMAGE_PIXELS or 0)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return None


def _is_recording(data: bytes) -> bool:
    """Return whether data begin like a recording of a known kind, and not like a text."""
    if data[:3] == b"ID3" and len(data) > 10:  # FFmpeg looks behind such a tag
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        data = data[10 + size :]
        if not (data[:1] == b"\xff" and data[1:2] >= b"\xe0"):
            return False
    is_known = (
        data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide")
        or data[:4] in (b"\x1a\x45\xdf\xa3", b"RIFF", b"OggS", b"fLaC")
        or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")
    )
    return is_known and b"\0" in data[:BINARY_WITHIN]
