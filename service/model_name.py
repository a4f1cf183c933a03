"""Reads and writes how requests name a model: `model`, or `model:adapter` for one of its LoRA adapters."""

from typing import NamedTuple

SEPARATOR = ":"


class ModelName(NamedTuple):
    """The model that a request names: `base`, whose workers run the request, and its `adapter`, if it names one."""

    base: str
    adapter: str | None = None

    @classmethod
    def of(cls, name: str) -> "ModelName":
        base, _, adapter = name.partition(SEPARATOR)
        return cls(base, adapter or None)

    def __str__(self) -> str:
        return self.base if self.adapter is None else f"{self.base}{SEPARATOR}{self.adapter}"
