"""What an engine on a CPU needs: SGLang's arguments and environment, its threads, and how long a step is."""

import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_ext.plugin.options import Options

# SGLang's wheel on a CPU: a bfloat16 GEMM on one thread gives each row the same bits whatever the batch around it
# (float32 does not, below four rows). A CPU without instructions for it takes seven times as long as in float32.
CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "lora_backend": "torch_native",
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "chunked_prefill_size": 4096,
}

# SGLang's argument for answers that do not depend on the batch around a request.
EXACT = "enable_deterministic_inference"
# How often a thread looks for work before it sleeps. OpenMP's own 300,000 keep a core from others
# (docs/results/engine.md).
SPINS = "5000"
# Flags of CPUs that multiply bfloat16 themselves: of x86, and of Arm.
MULTIPLIES_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
CPU_FLAGS = Path("/proc/cpuinfo")
MOST_MEMORY = 0.4  # of what the process may use, for weights and KV cache in float32
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in a period
MEMORY = Path("/sys/fs/cgroup/memory.max")  # of a container, in bytes
MOST_STEP_S = 0.5  # for the prompts of one step, in which nobody else gets a token
LEAST_CHUNK = 64  # tokens
REACHED = 0.25  # of a matrix product's pace, by a whole step
TIMINGS = 5  # of which the best counts: others may use the machine
_SIDE, _ROWS = 2048, 256  # of the matrices by which the CPU is measured


def sleep_soon() -> None:
    """Let threads that wait for each other sleep soon. Call it before anything loads torch, whose OpenMP reads it."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def prepare(options: Options, engine_args: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Prepare the environment for an engine; return its options, and the arguments that SGLang knows on a CPU."""
    from torch._dynamo import config as torch_compiler  # here, because `sleep_soon` must come before torch

    ranks = int(engine_args.get("tp_size", 1))
    options = replace(options, cpu_threads=None if engine_args.get(EXACT) else threads_for(ranks))
    # Ranks and machines that run one engine must agree on a chunk, and an emulated device has a pace of its own.
    is_alone = ranks == 1 and int(engine_args.get("nnodes", 1)) == 1
    if options.cpu_threads and is_alone and not options.emulated and "chunked_prefill_size" not in engine_args:
        options = replace(options, cpu_step_s=MOST_STEP_S)
    if options.cpu_threads is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if ranks > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _a_core_each(ranks))
    # Otherwise the first request with a penalty makes torch compile for ten seconds, while all others wait.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # for processes that start
    torch_compiler.disable = True  # for those that are forked from this one, which has read the environment already
    return options, {name: value for name, value in engine_args.items() if name != EXACT}


def arguments_for(options: Options, engine_args: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's arguments, with the dtype and how many prompt tokens a step has.

    An emulated device is as fast as it says, and machines that run one engine together must agree.
    """
    if options.emulated or int(engine_args.get("nnodes", 1)) > 1:
        return CPU_DEFAULTS
    page = int(engine_args.get("page_size") or 1)
    shape, dtype = options.cost.shape, CPU_DEFAULTS["dtype"]
    if options.cpu_threads is not None:
        tokens = int(engine_args.get("max_total_tokens") or CPU_DEFAULTS["max_total_tokens"])
        dtype = dtype_for(4 * shape.parameters + tokens * shape.kv_bytes_per_token(4))
    wide = engine_args.get("dtype", dtype) in ("float32", "float")
    chunk = chunk_for(shape.active_parameters, options.cpu_threads or 1, wide)
    return CPU_DEFAULTS | {"dtype": dtype, "chunked_prefill_size": -(-chunk // page) * page}


def dtype_for(wide_bytes: float) -> str:
    """Return the dtype in which this CPU answers sooner: float32 where it has no arithmetic for bfloat16.

    `wide_bytes`: of weights and KV cache in float32; if they would take much of the memory it is bfloat16 all the same.
    """
    found = (
        re.search(r"^(?:flags|Features)\s*:(.*)$", CPU_FLAGS.read_text(), re.MULTILINE) if CPU_FLAGS.exists() else None
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # not in a control group, or "max"
        memory = min(memory, int(MEMORY.read_text()))
    slow = found is not None and MULTIPLIES_BFLOAT16.isdisjoint(found[1].split())
    return "float32" if slow and wide_bytes <= MOST_MEMORY * memory else "bfloat16"


def _a_core_each(ranks: int) -> str:
    """Return SGLang's setting for so many ranks on this machine's cores; without it several ranks do not start."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


def threads_for(ranks: int) -> int:
    """Return how many threads each rank of an engine has, of OMP_NUM_THREADS or all cores that the process may use.

    Several ranks have a core each, to which SGLang binds them.
    """
    if ranks > 1:
        return 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # not in a control group, or "max"
        pass
    return max(1, int(given) if given.isdecimal() else cores)


def chunk_for(parameters: float, threads: int, wide: bool) -> int:
    """Return the prompt tokens that a model with so many active parameters computes on this CPU in MOST_STEP_S.

    `wide`: in float32, otherwise in bfloat16. It is a power of two, and at most the chunk of CPU_DEFAULTS.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that has used several cannot be forked any more
    try:
        weights, rows = (
            torch.ones(size, _SIDE, dtype=torch.float32 if wide else torch.bfloat16) for size in (_SIDE, _ROWS)
        )
        torch.nn.functional.linear(rows, weights)
        times: list[float] = []
        for _ in range(TIMINGS):
            began = time.perf_counter()
            torch.nn.functional.linear(rows, weights)
            times.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    flops = REACHED * threads * 2 * _ROWS * _SIDE * _SIDE / max(min(times), 1e-9)
    tokens = MOST_STEP_S * flops / max(1.0, 2 * parameters)
    most = int(CPU_DEFAULTS["chunked_prefill_size"])
    return max(LEAST_CHUNK, min(most, 1 << int(tokens).bit_length() - 1)) if tokens >= 1 else LEAST_CHUNK
