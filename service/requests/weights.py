"""Finds files of weights that are missing or cut off, as a copy or a download that was interrupted leaves them."""

import json
from pathlib import Path
from typing import Any

MOST_HEADER = 100_000_000  # bytes, as the safetensors library has it
KINDS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
INDEX = "model.safetensors.index.json"  # names the files that an engine reads, if it is there


def weight_faults(folder: Path) -> list[str]:
    """Return what is wrong with the files of weights in a model's folder, each with its file's name."""
    if not any(next(folder.glob(kind), None) for kind in KINDS):
        return [f"there are no weights ({', '.join(KINDS)})"]
    # Others may be there in part: the same weights in another format, whose files nobody wanted.
    read = [folder / name for name in _named(folder / INDEX)] or list(folder.glob("*.safetensors"))
    faults = ((file, _cut_off(file) if file.exists() else "is not there") for file in sorted(read))
    return [f"{file.name} {fault}" for file, fault in faults if fault]


def _named(index: Path) -> set[str]:
    try:
        names: Any = json.loads(index.read_bytes())["weight_map"].values()
        return set(map(str, names))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def _cut_off(file: Path) -> str | None:
    """Return why a safetensors file is not whole: its header says where its last tensor ends."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER):
            return f"is damaged or cut off: it has {size:,} bytes, fewer than its header"
        try:
            tensors: dict[str, Any] = json.loads(opened.read(length))
            ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
            whole = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):
            return "is damaged: its header cannot be read"
    return None if size == whole else f"has {size:,} bytes, and its header says {whole:,}: copy or download it again"
