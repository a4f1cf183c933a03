"""Where SGLang finds the CPU platform; it looks while it is being imported itself, so nothing of it is imported."""

import platform
from functools import cache


@cache
def gpu_is_present() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def machine_name() -> str:
    """Of the accelerator, or of this host where there is none; it opens the accelerator in this process."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"the CPU of {platform.node()}"


def accelerator_memory() -> int | None:
    """Bytes of one accelerator; None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def activate_cpu() -> str | None:
    """`sglang.srt.platforms`: the CPU platform, only where there is no GPU."""
    return None if gpu_is_present() else "engine_ext.plugin.cpu.platform.CpuPlatform"
