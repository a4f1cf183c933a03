"""Finds the programs with which SGLang compiles kernels for a GPU at a worker's start: nvcc, g++ and ninja.

pip brings nvcc and ninja into this environment, where only an activated one has them on PATH, and the library that
programs of CUDA link with under the name that they load, not the one that a linker looks for.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
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

    CUDA_HOME is set with nvcc, unless it is set already, and LIBRARY_PATH gets a folder with pip's libcudart.so.
    """
    for name in NEEDED:
        if shutil.which(name, path=environment.get("PATH", "")):
            continue
        for folder in folders():
            if os.access(folder / name, os.X_OK):
                environment["PATH"] = f"{environment.get('PATH', '')}{os.pathsep}{folder}".strip(os.pathsep)
                if name == "nvcc":
                    environment.setdefault("CUDA_HOME", str(folder.parent))
                    _link_library(environment, folder.parent)
                break
    return [name for name in NEEDED if not shutil.which(name, path=environment.get("PATH", ""))]


def _link_library(environment: MutableMapping[str, str], cuda: Path) -> None:
    """Let a linker find the libcudart of this CUDA; what is missing without it is said by the linker."""
    versions = sorted((cuda / "lib").glob("libcudart.so.*"))
    if not versions:
        return
    folder = Path(sys.prefix) / "lib" / "batchweave-cuda"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / "libcudart.so").symlink_to(versions[-1])
    except OSError:  # this environment is another user's: its first worker, or doctor, of that user makes the link
        return
    paths = (str(folder), environment.get("LIBRARY_PATH", ""))
    environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
