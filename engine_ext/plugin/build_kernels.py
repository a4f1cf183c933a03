"""python -m engine_ext.plugin.build_kernels 9.0: compiles kernels for a GPU before there is one, for an image.

SGLang compiles four kernels at its first start, one after the other, and flashinfer's sampling at the first request
with top_p or top_k: minutes of nvcc, which this spends once. Both find what was built by its sources and the GPU's
compute capability (TVM_FFI_CACHE_DIR, FLASHINFER_WORKSPACE_BASE), and compile at a start what is missing: models with
other shapes of heads than HEADS and KV_HEADS.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# pyright: reportPrivateUsage=false

HEADS = (64, 128)  # sizes of heads in values
KV_HEADS = (1, 2, 4, 8)  # of one GPU: eight over `tp_size`


def kernels() -> dict[str, Callable[[], Any]]:
    """Return what a model in bf16 needs, by name: a call builds it."""
    import torch
    from flashinfer.jit.sampling import gen_sampling_module
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache

    bf16 = torch.bfloat16
    rows = sorted({size * heads * bf16.itemsize for size in HEADS for heads in KV_HEADS})
    return {
        "activation": partial(activation.activation_module, bf16),
        "clamp": partial(clamp_position._jit_clamp_position_module, torch.int64),
        **{f"rope of {size}": partial(rope._jit_fused_rope_module, True, size, bf16, bf16) for size in HEADS},
        **{f"KV rows of {each} bytes": partial(kvcache._jit_kvcache_module, each, each) for each in rows},
        "sampling": partial(gen_sampling_module().build, verbose=False),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_ext.plugin.build_kernels", description=__doc__)
    parser.add_argument("capability", help="9.0 for Hopper, 10.0 for Blackwell; a process builds for one")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    given = parser.parse_args()
    if not re.fullmatch(r"\d{1,2}\.\d", given.capability):
        parser.error(f"{given.capability} is no compute capability, such as 9.0")
    major, minor = map(int, given.capability.split("."))
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", given.capability + ("a" if major >= 9 else ""))
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch

    failed = 0
    with override_jit_cuda_arch(major, minor):
        for name, build in kernels().items():
            if given.only not in name:
                continue
            started = time.monotonic()
            try:
                build()
                said = "built"
            except Exception as error:  # each for itself: an engine compiles what is missing
                said, failed = f"failed: {str(error).strip()[-2000:]}", 1
            print(f"{name}: {said}, {time.monotonic() - started:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
