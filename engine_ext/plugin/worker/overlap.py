"""Chooses how compute-heavy prefill overlaps memory-heavy decodes, among SGLang's ways that work here."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from engine_ext.plugin.options import Overlap
from engine_ext.plugin.platform_entry import gpu_is_present

log = logging.getLogger(__name__)

INSTEAD = {Overlap.PDMUX: Overlap.MIXED, Overlap.NANO: Overlap.MIXED, Overlap.MIXED: Overlap.NONE}
ARGUMENTS: dict[Overlap, dict[str, Any]] = {
    Overlap.NONE: {},
    Overlap.MIXED: {"enable_mixed_chunk": True},
    Overlap.NANO: {"enable_mixed_chunk": True, "disable_prefill_cuda_graph": True},  # a graph has no turns
    Overlap.PDMUX: {"enable_pdmux": True, "chunked_prefill_size": -1, "disable_overlap_schedule": True},
}
MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # those that plugin/scheduler/nano.py splits
WHOLE = {  # arguments with which a step cannot be split
    "enable_dp_attention": "data-parallel attention",
    "enable_lora": "LoRA",
    "lora_paths": "LoRA",
    "enable_torch_compile": "torch.compile",
    "enable_two_batch_overlap": "two-batch overlap",
    # Weights are swapped in around a layer, inside of which the other half has its turn.
    "cpu_offload_gb": "offloaded weights",
    "offload_group_size": "offloaded weights",
    # These win over `disable_prefill_cuda_graph`.
    "cuda_graph_backend_prefill": "CUDA graphs of prefills",
    "cuda_graph_config": "CUDA graphs of its own",
}
GREEN_CONTEXTS = range(6, 10)  # major compute capabilities whose SMs SGLang 0.5.17 can split


def choose(wanted: Overlap | None, model_path: str, engine_args: Mapping[str, Any]) -> Overlap:
    """Return the wanted overlap, or the next best that this machine, model and `engine_args` allow; the log says why.

    An overlap that `engine_args` ask for counts as wanted. The default is mixed chunks on a GPU, and none on a CPU,
    where SGLang computes a cached prefix again in a chunk.
    """
    if engine_args.get("enable_pdmux"):
        wanted = Overlap.PDMUX
    elif engine_args.get("enable_mixed_chunk"):
        wanted = wanted if wanted is Overlap.NANO else Overlap.MIXED
    found = wanted or (Overlap.MIXED if gpu_is_present() else Overlap.NONE)
    while reason := against(found, model_path, engine_args):
        instead = INSTEAD[found]
        if wanted is not None:
            log.warning("overlap %r is not possible here, using %r instead: %s", found.value, instead.value, reason)
        found = instead
    return found


def against(overlap: Overlap, model_path: str, given: Mapping[str, Any]) -> str | None:
    """Return why this overlap is not possible here, or None if it is possible."""
    if overlap is Overlap.NONE:
        return None
    if given.get("speculative_algorithm"):
        return "the engine's arguments ask for speculative decoding"
    if overlap is Overlap.PDMUX:
        return _against_pdmux(model_path, given)
    chunk = given.get("chunked_prefill_size")
    if chunk is not None and chunk <= 0:
        return "the engine's arguments turn chunked prefill off"
    return None if overlap is Overlap.MIXED else _against_halves(model_path, given)


def _against_halves(model_path: str, given: Mapping[str, Any]) -> str | None:
    if int(given.get("pp_size", 1)) > 1:
        return "the engine's arguments ask for pipeline parallelism"
    for name, words in WHOLE.items():
        if given.get(name):
            return f"the engine's arguments ask for {words}"
    if given.get("disable_prefill_cuda_graph") is False:
        return "the engine's arguments ask for CUDA graphs of prefills"
    _, model = _model_of(model_path, given)
    return None if model in MODELS else f"{model} is not one of {', '.join(MODELS)}"


def _against_pdmux(model_path: str, given: Mapping[str, Any]) -> str | None:
    if not gpu_is_present():
        return "there is no GPU"
    chunk = given.get("chunked_prefill_size")
    if chunk is not None and chunk > 0:
        return "the engine's arguments ask for chunked prefill"
    if int(given.get("pp_size", 1)) > 1:
        return "the engine's arguments ask for pipeline parallelism"
    if given.get("disaggregation_mode", "null") != "null":
        return "the engine's arguments ask for disaggregation"
    if given.get("enable_dp_attention"):
        return "the engine's arguments ask for data-parallel attention"
    if given.get("disable_overlap_schedule") is False:
        return "the engine's arguments ask for the overlap schedule"
    if given.get("enable_lora") or given.get("lora_paths"):  # a decode would overwrite whose weights a prefill uses
        return "the engine's arguments ask for LoRA"
    if given.get("enable_hierarchical_cache"):  # SGLang does not wait for what it brings back
        return "the engine's arguments ask for copies of KV cache in host memory"
    return _against_green_contexts() or _against_split_prefill(model_path, given)


def _against_green_contexts() -> str | None:
    major, minor = torch.cuda.get_device_capability()
    if major not in GREEN_CONTEXTS:
        return f"SGLang does not know how to split the SMs of compute capability {major}.{minor}"
    try:
        from sgl_kernel import spatial  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except (ImportError, OSError) as error:
        return f"sglang-kernel cannot split SMs: {error}"
    return None


def _against_split_prefill(model_path: str, given: Mapping[str, Any]) -> str | None:
    model, name = _model_of(model_path, given)
    return None if hasattr(model, "forward_split_prefill") else f"{name} cannot be prefilled layer by layer"


def _model_of(model_path: str, given: Mapping[str, Any]) -> tuple[type, str]:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import ModelRegistry

    override = given.get("json_model_override_args", "{}")
    config = ModelConfig(
        model_path,
        trust_remote_code=bool(given.get("trust_remote_code", False)),
        revision=given.get("revision"),
        model_override_args=override,
    )
    return ModelRegistry.resolve_model_cls(config.hf_config.architectures or [])
