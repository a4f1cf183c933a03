"""Where SGLang finds the CPU platform; it looks while it is being imported itself, so nothing of it is imported."""

from functools import cache


@cache
def gpu_is_present() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def activate_cpu() -> str | None:
    """`sglang.srt.platforms`: the CPU platform, only where there is no GPU."""
    return None if gpu_is_present() else "engine_ext.plugin.platform_cpu.CpuPlatform"
