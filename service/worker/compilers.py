"""Finds the programs with which SGLang compiles kernels for a GPU at a worker's start: nvcc, g++ and ninja.

pip brings nvcc and ninja into this environment, where only an activated one has them on PATH.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

NEEDED = ("nvcc", "g++", "ninja")


def _folders() -> list[Path]:
    """Return the folders of this environment that may have one of them."""
    spec = importlib.util.find_spec("nvidia")
    of_cuda = [Path(each) for each in (spec.submodule_search_locations or [])] if spec else []
    return [Path(sys.executable).parent, *(nvcc.parent for each in of_cuda for nvcc in sorted(each.glob("*/bin/nvcc")))]


def put_on_path(
    environment: MutableMapping[str, str] = os.environ, folders: Callable[[], list[Path]] = _folders
) -> list[str]:
    """Put on PATH, behind all else, what it lacks and this environment has; return the names of those that are missing.

    CUDA_HOME is set with nvcc, unless it is set already.
    """
    for name in NEEDED:
        if shutil.which(name, path=environment.get("PATH", "")):
            continue
        for folder in folders():
            if os.access(folder / name, os.X_OK):
                environment["PATH"] = f"{environment.get('PATH', '')}{os.pathsep}{folder}".strip(os.pathsep)
                if name == "nvcc":
                    environment.setdefault("CUDA_HOME", str(folder.parent))
                break
    return [name for name in NEEDED if not shutil.which(name, path=environment.get("PATH", ""))]
