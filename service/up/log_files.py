"""Rotates the logs of the children of `up`, each of which writes to one open file for as long as it lives."""

import os
import shutil
from pathlib import Path

MOST_BYTES = 64 * 1024 * 1024


def rotate(path: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Move a large log's content to `<name>.1`, replacing that file, and return whether the log was large.

    The writer appends, so truncating the log is enough and the writer need not open it again. What is written between
    the copy and the truncation is lost; without room for a copy, the whole content is lost. Raises OSError.
    """
    if not path.exists() or path.stat().st_size <= most_bytes:
        return False
    before = path.with_name(f"{path.name}.1")
    before.unlink(missing_ok=True)
    try:
        shutil.copyfile(path, before)
    except OSError:
        before.unlink(missing_ok=True)
    os.truncate(path, 0)
    return True
