"""Opens batch files as the service takes them: compressed with gzip or not, with a byte order mark or without."""

import gzip
import io
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that some programs write before the first line
EXAMPLE = (  # of a line, for messages
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "…", "messages": […]}}'
)


@contextmanager
def opened(path: Path) -> Generator[BinaryIO, None, None]:
    """Yield the file's text as bytes, unpacked. Only b"\\n" ends its lines. Raises OSError, EOFError, zlib.error."""
    with path.open("rb") as raw:
        unpacked = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == GZIP else None
        text = raw if unpacked is None else io.BufferedReader(unpacked)
        if text.peek(3).startswith(BYTE_ORDER_MARK):
            text.read(len(BYTE_ORDER_MARK))
        yield text
