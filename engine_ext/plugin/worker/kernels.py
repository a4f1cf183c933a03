"""Asks an engine once for each kind of sampling, so that no request waits for its kernel to be compiled.

SGLang compiles kernels of flashinfer at the first request that needs them, which takes up to minutes on a GPU: in the
middle of serving, a step that long looks like a hang.
"""

import logging
from typing import Any

from engine_ext.plugin.marks import KIND

log = logging.getLogger(__name__)
TOKENS = 4  # of each answer
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p and top_k": {"top_p": 0.9, "top_k": 20},
    "min_p": {"min_p": 0.1},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "a JSON schema": {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
}


async def ask_for_each(engine: Any) -> list[str]:
    """Run a short request of each kind on an SGLang Engine, and one with logprobs; return the kinds that it refused."""
    refused: list[str] = []
    for kind, sampling in KINDS.items():
        if not await _runs(engine, kind, {"max_new_tokens": TOKENS, **sampling}, {}):
            refused.append(kind)
    if not await _runs(engine, "logprobs", {"max_new_tokens": TOKENS}, {"return_logprob": True, "top_logprobs_num": 2}):
        refused.append("logprobs")
    return refused


async def ask_for_prompt(engine: Any, tokens: int, vocab_size: int) -> None:
    """Run one request with a prompt of so many tokens."""
    ids = [each % vocab_size for each in range(1, max(1, tokens) + 1)]
    await _runs(engine, "a long prompt", {"max_new_tokens": 1}, {"input_ids": ids})


async def _runs(engine: Any, kind: str, sampling: dict[str, Any], more: dict[str, Any]) -> bool:
    # As a batch's requests: after online ones, batches would leave room for more of them for an hour.
    sampling = {**sampling, "custom_params": {KIND: "kernels"}}
    try:
        answer = await engine.async_generate(**{"input_ids": list(range(1, 9)), "sampling_params": sampling, **more})
    except ValueError as error:  # what this engine cannot do, such as schemas without a grammar backend
        log.warning("the engine refuses requests with %s: %s", kind, error)
        return False
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        log.warning("the engine refuses requests with %s: %s", kind, reason.get("message"))
    return reason["type"] != "abort"
