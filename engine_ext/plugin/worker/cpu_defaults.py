"""Server arguments for SGLang on a CPU."""

from typing import Any

# SGLang's wheel on a CPU: bfloat16 GEMM gives each row the same bits whatever the batch around it (float32 does not,
# below four rows). A single thread keeps it that way, and leaves the machine usable.
CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "lora_backend": "torch_native",
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "chunked_prefill_size": 4096,
}
