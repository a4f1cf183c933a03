"""Pack SGLang, batchweave's entry points and workloads for a Hopper machine without a network, small enough to send.

python -m benchmarks.gpu.pack build/lease --data DATA [--kernels FOLDER]

The machine needs Python 3.12, the packages that PRESENT names (PyTorch 2.11 for CUDA 13, triton, numba and others), and
the repository. Versions are those of requirements/engine.txt. `--kernels` names a folder with fa3.thin.xz (FA3's
library, of which only the kernels for bf16 and heads of 128 are packed: `unpack.py`) and jit/ (what SGLang would
compile with nvcc at its first start); without them, attention is triton's and the start takes a minute more. There:
`sh benchmarks/gpu/lease.sh PACK OUTPUT SECONDS`.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from benchmarks.gpu import workloads
from benchmarks.gpu.plan import ROWS

ROOT = Path(__file__).parents[2]
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_34"
SHARDS = 8  # which the machine unpacks at once
MOST_MIB = 60  # of the pack and the repository together
# What the engine and this benchmark import, apart from PRESENT.
PACKAGES = """
    sglang sglang-kernel flashinfer-python xgrammar transformers tokenizers orjson pybase64 starlette ipython traitlets
    pydantic pydantic-core typing-inspection pyzmq dill msgspec openai annotated-types sniffio distro jiter
    partial-json-parser apache-tvm-ffi compressed-tensors loguru gguf uvicorn fastapi opentelemetry-api setproctitle
    greenlet pydantic-settings python-dotenv structlog
""".split()  # noqa: SIM905
# What the machine must have; a version is named only where other versions fail.
PRESENT = {
    "torch": "2.11",
    "torchvision": "0.26",
    **dict.fromkeys(
        """triton numpy numba matplotlib safetensors ninja tiktoken huggingface-hub jinja2 httpx typer rich pyyaml
        aiohttp prometheus-client psutil requests tqdm pillow einops regex sentencepiece scipy protobuf
        uvloop""".split(),  # noqa: SIM905
        "",
    ),
}
DROPPED = (
    "sgl_kernel/flash_ops.*",  # every architecture: 1.1 GB
    "sgl_kernel/flashmla_ops.*",
    "sgl_kernel/infllm_ops.*",
    "sgl_kernel/sm100/*",
    "flashinfer/data/cutlass",
    "flashinfer/data/csrc",
    "flashinfer/data/cccl",
    "flashinfer/data/spdlog",
    "xgrammar/lib",
    "sglang/multimodal_gen",
    "sglang/test",
    "sglang/srt/server",  # a server in Rust
    "sglang/srt/grpc/_core.*",
    "sglang/srt/multimodal/_core.*",
    "bin",
    "include",
    "share",
    "**/__pycache__",
    "**/tests",
)


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
        [*uv, "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", *target, *pinned(PACKAGES)], check=True
    )
    # batchweave's code is the working tree's; SGLang finds the plugins by this package's entry points.
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*uv, "build", "--wheel", "-q", "-o", folder, str(ROOT)], check=True)
        [wheel] = Path(folder).glob("*.whl")
        shutil.unpack_archive(wheel, Path(folder) / "wheel", "zip")
        [info] = (Path(folder) / "wheel").glob("*.dist-info")
        shutil.copytree(info, site / info.name)
    for pattern in DROPPED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["strip", "--strip-unneeded", str(site / "xgrammar" / "libxgrammar_bindings.so")], check=True)


def shard(site: Path, output: Path) -> None:
    """Write the files as archives of about the same size, since each is unpacked by one core."""
    shares: list[list[Path]] = [[] for _ in range(SHARDS)]
    sizes = [0] * SHARDS
    files = [path for path in site.rglob("*") if path.is_file() or path.is_symlink()]
    for path in sorted(files, key=lambda path: -path.lstat().st_size):
        least = sizes.index(min(sizes))
        shares[least].append(path)
        sizes[least] += path.lstat().st_size + 512

    def write(number: int) -> None:
        with tarfile.open(output / f"site.{number}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(shares[number]):
                archive.add(path, path.relative_to(site))

    with ThreadPool() as pool:
        pool.map(write, range(SHARDS))


def write_sums(output: Path) -> None:
    files = sorted(path for path in output.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(output)}\n" for path in files]
    (output / "sums").write_text("".join(sums))


def mib_of(files: Sequence[Path]) -> float:
    return sum(path.stat().st_size for path in files) / (1 << 20)


def repository() -> list[Path]:
    """Return the files that travel with the pack: those that git knows or does not ignore."""
    asked = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a new folder; name one that git ignores")
    parser.add_argument("--data", type=Path, required=True, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("--kernels", type=Path, help="folder with fa3.thin.xz and jit/")
    given = parser.parse_args()
    if given.output.exists():
        parser.error(f"{given.output} exists; name a new folder")
    given.output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        fill(site)
        shard(site, given.output)
    if given.kernels:
        shutil.copyfile(given.kernels / "fa3.thin.xz", given.output / "fa3.thin.xz")
        shutil.copytree(given.kernels / "jit", given.output / "jit", copy_function=shutil.copyfile)
    workloads.write(given.data, [mix for mix, _ in ROWS], given.output / "work")
    write_sums(given.output)
    pack, own = mib_of([path for path in given.output.rglob("*") if path.is_file()]), mib_of(repository())
    print(f"{pack:.1f} MiB in {given.output}, and {own:.1f} MiB of the repository; at most {MOST_MIB} together")
    if pack + own > MOST_MIB:
        sys.exit("that is too much to send")


if __name__ == "__main__":
    main()
