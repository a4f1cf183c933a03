"""Lets several ranks of one engine talk to each other on a CPU, where SGLang takes an out-of-tree platform for CUDA."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


def without_nccl(original: Callable[..., None], group: Any, *args: Any, **kwargs: Any) -> None:
    """Create a group of ranks whose collectives need no GPU."""
    original(group, *args, **{**kwargs, "use_pynccl": False})


HOOKS = [("sglang.srt.distributed.parallel_state.GroupCoordinator.__init__", without_nccl, HookType.AROUND)]
