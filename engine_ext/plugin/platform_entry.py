"""Lets SGLang find the CPU platform; it looks while it is being imported itself, so nothing here imports SGLang."""

import platform
from functools import cache


@cache
def gpu_is_present() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def machine_name() -> str:
    """Return the name of the accelerator, or of this host without one; it opens the accelerator in this process."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"the CPU of {platform.node()}"


def accelerator_memory() -> int | None:
    """Return the bytes of one accelerator's memory; None without an accelerator."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def activate_cpu() -> str | None:
    """Return the CPU platform if there is no GPU; the entry point in `sglang.srt.platforms`."""
    return None if gpu_is_present() else "engine_ext.plugin.cpu.platform.CpuPlatform"
