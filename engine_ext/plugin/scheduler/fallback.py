"""Says which of SGLang's schedulers the dual scan cannot drive; SGLang's own policy schedules these."""

from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode


def is_alone(scheduler: Any) -> bool:
    """Return whether a benchmark lets SGLang's own policy run, with nothing of ours in its steps."""
    return getattr(scheduler, "batchweave_alone", False)


def reason_for_sglang(scheduler: Any) -> str | None:
    """Return why SGLang's own policy must schedule, or None if the dual scan can (docs/engine.md, what runs under it).

    Answers would be right in each case, but the scan would learn wrong lengths or count memory that is not there.
    """
    if is_alone(scheduler):
        return "a benchmark compares with SGLang's own policy"
    if scheduler.ps.pp_size > 1:
        return "with pipeline parallelism each micro-batch has running requests of its own"
    if not scheduler.spec_algorithm.is_none():
        return "with speculative decoding an answer grows by several tokens in a step"
    if scheduler.disaggregation_mode is not DisaggregationMode.NULL:
        return "with disaggregation another engine prefills or decodes"
    if scheduler.enable_hisparse:
        return "with hierarchical sparse attention requests are staged between prefill and decode"
    if scheduler.enable_hicache_storage:
        return "with KV cache in storage SGLang fetches what it has for all requests that wait"
    if scheduler.dllm_config is not None:
        return "a diffusion language model does not decode token by token"
    return None
