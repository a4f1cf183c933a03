"""Unpack what `benchmarks.gpu.pack` made: `python unpack.py PACK FOLDER`. It needs nothing but Python."""

import compileall
import hashlib
import json
import lzma
import os
import shutil
import sys
import tarfile
from multiprocessing import Pool
from pathlib import Path

DONE = "unpacked"


def unpack(pack: Path, folder: Path) -> None:
    """Check the sums, and fill FOLDER/site, for PYTHONPATH, FOLDER/jit, for TVM_FFI_CACHE_DIR, and FOLDER/work."""
    for line in (pack / "sums").read_text().splitlines():
        digest, name = line.split("  ", 1)
        if hashlib.sha256((pack / name).read_bytes()).hexdigest() != digest:
            sys.exit(f"{pack / name} is not what was packed; copy it again")
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    with Pool() as pool:
        pool.starmap(extract, [(archive, site) for archive in sorted(pack.glob("site.*.tar.xz"))])
    if (pack / "fa3.thin.xz").exists():
        unthin(pack / "fa3.thin.xz", site / "sgl_kernel" / "flash_ops.abi3.so")
    if (pack / "jit").exists():
        shutil.copytree(pack / "jit", folder / "jit", dirs_exist_ok=True)
    shutil.copytree(pack / "work", folder / "work", dirs_exist_ok=True)
    compileall.compile_dir(site, quiet=2, workers=0)
    (folder / DONE).write_text(_digest(pack))


def _digest(pack: Path) -> str:
    return hashlib.sha256((pack / "sums").read_bytes()).hexdigest()


def extract(archive: Path, site: Path) -> None:
    with tarfile.open(archive) as files:
        for each in files:
            # Others make the same folders at the same time, which `extract` takes for an error.
            os.makedirs(site / Path(each.name).parent, exist_ok=True)
            files.extract(each, site, filter="data")


def unthin(thin: Path, library: Path) -> None:
    """Write a library of which only some kernels were packed.

    The packed file has a line of JSON, {"size": bytes of the library, "pieces": [[offset, length], ...]}, and then the
    pieces; what lies between them is zero.
    """
    with lzma.open(thin) as packed, library.open("wb") as file:
        header = json.loads(packed.readline())
        file.truncate(header["size"])
        for offset, length in header["pieces"]:
            file.seek(offset)
            file.write(packed.read(length))
    library.chmod(0o755)


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    done = target / DONE
    if not done.exists() or done.read_text() != _digest(source):
        unpack(source, target)
