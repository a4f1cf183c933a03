"""Logs of the children of `up`, which write to one file each for as long as they live."""

import os
import shutil
from pathlib import Path

MOST_BYTES = 64 * 1024 * 1024


def rotate(path: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Move what a log has to `<name>.1`, in place of what was there, once it is large; whether it was.

    Whoever writes appends, so that cutting the file is enough and nobody opens it again. What is written between the
    copy and the cut is lost; where there is no room for a copy, all of it is. Raises OSError.
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
