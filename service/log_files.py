"""Logs of the children of `up`, which write to one file each for as long as they live."""

import os
import shutil
from pathlib import Path

MOST_BYTES = 64 * 1024 * 1024


def turn_over(path: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Move what a log has to `<name>.1`, in place of what was there, once it is large; whether it was.

    Whoever writes appends, so that cutting the file is enough and nobody opens it again. What is written between the
    copy and the cut is lost.
    """
    if not path.exists() or path.stat().st_size <= most_bytes:
        return False
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True
