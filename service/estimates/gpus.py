"""Says which NVIDIA GPUs this process may use, as nvidia-smi and CUDA_VISIBLE_DEVICES name them."""

import re
import subprocess
from dataclasses import dataclass
from itertools import takewhile

import structlog

from service.settings import visible_gpus

ASK_S = 20.0
_QUERY = ("nvidia-smi", "--query-gpu=index,memory.total,uuid,name", "--format=csv,noheader,nounits")
GPU_NAME = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,64}")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its number or UUID; `memory_bytes` is None, and `product` empty, if they are not known."""

    name: str
    memory_bytes: int | None = None
    product: str = ""  # as its driver names it, such as "NVIDIA H200"


def machine_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all."""
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=ASK_S)
        listed = found.stdout  # also if it fails: where one GPU is lost, it lists the others
        if found.returncode:
            log.warning("nvidia-smi does not say which GPUs there are", error=f"exit code {found.returncode}")
    except (OSError, subprocess.SubprocessError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("nvidia-smi does not say which GPUs there are", error=repr(error))
        listed = ""
    there: list[Gpu] = []
    by_uuid: dict[str, Gpu] = {}
    for line in listed.splitlines():
        name, memory, uuid, product = ([each.strip() for each in line.split(",", 3)] + [""] * 4)[:4]
        if GPU_NAME.fullmatch(name):
            there.append(Gpu(name, int(memory) * 2**20 if memory.isdigit() else None, product))
            by_uuid[uuid] = Gpu(uuid, there[-1].memory_bytes, product)
    if (visible := visible_gpus()) is None or not there:
        return there
    found = by_uuid | {each.name: each for each in there}
    # As in CUDA, the list ends at the first entry that names no GPU, such as -1.
    named = takewhile(
        lambda name: name in found or (GPU_NAME.fullmatch(name) and not name.isdigit()), split_names(visible)
    )
    return [found.get(name, Gpu(name)) for name in dict.fromkeys(named)]


def split_names(names: str) -> list[str]:
    return [each.strip() for each in names.split(",") if each.strip()]
