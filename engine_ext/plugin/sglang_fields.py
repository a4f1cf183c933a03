"""Lists the fields of SGLang's objects that the hooks touch; an engine whose SGLang lacks one of them does not start.

A hook whose function is gone shows at the start, because SGLang does not patch it. A renamed field would show only in
the step that first touches it.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from engine_ext.errors import EngineStartError

_MANAGERS = "sglang.srt.managers"
_SCHEDULER = (
    "_engine_paused chunked_prefill_size chunked_req disaggregation_mode dllm_config enable_hicache_storage"
    " enable_hisparse enable_lora enable_lora_overlap_loading enable_overlap enable_pdmux get_num_allocatable_reqs"
    " grammar_manager invariant_checker is_mixed_chunk last_batch max_loras_per_batch max_running_requests"
    " max_total_num_tokens new_token_ratio_tracker page_size ps running_batch sliding_window_size spec_algorithm"
    " token_to_kv_pool_allocator tp_worker tree_cache waiting_queue"
)
FIELDS: Mapping[str, str] = {  # by class, separated by spaces
    f"{_MANAGERS}.scheduler.Scheduler": _SCHEDULER,
    f"{_MANAGERS}.schedule_batch.Req": (
        "cached_tokens cached_tokens_device cached_tokens_host cached_tokens_storage extend_range extra_key finished"
        " finished_reason full_untruncated_fill_ids get_fill_ids logprob_start_len origin_input_ids output_ids"
        " prefix_indices req_pool_idx reset_for_retract return_logprob rid sampling_params to_finish"
    ),
    f"{_MANAGERS}.schedule_batch.ScheduleBatch": (
        "batch_is_full batch_size decoding_reqs extend_lens filter_batch forward_mode is_empty merge_batch model_config"
        " multimodal_inputs prefix_lens reqs return_logprob sampling_info seq_lens_cpu spec_info"
    ),
    f"{_MANAGERS}.schedule_policy.PrefillAdder": (
        "_get_running_request_total_token_offset ceil_paged_tokens cur_rem_token_offset is_hybrid_swa page_size"
        " rem_chunk_tokens rem_total_token_offset running_batch tree_cache"
    ),
    "sglang.srt.mem_cache.radix_cache.RadixCache": (
        "_delete_leaf _record_remove_event disable is_eagle match_prefix page_size req_to_token_pool root_node"
        " supports_mamba token_to_kv_pool_allocator"
    ),
    "sglang.srt.mem_cache.radix_cache.TreeNode": (
        "children evicted hash_value hit_count key last_access_time lock_ref parent priority value"
    ),
}


def check() -> None:
    """Check that the installed SGLang has all FIELDS. Raises EngineStartError, which names those that are missing."""
    gone = missing(FIELDS)
    if gone:
        raise EngineStartError(
            f"the installed SGLang lacks what batchweave's scheduling relies on: {', '.join(gone)}. Install a version "
            "that batchweave was tested with, or choose BATCHWEAVE_SCHEDULING=sglang"
        )


def missing(fields: Mapping[str, str]) -> list[str]:
    """Return what these classes lack, as "Class.field"."""
    gone: list[str] = []
    for path, names in fields.items():
        module, _, name = path.rpartition(".")
        found: Any = None
        with suppress(ModuleNotFoundError):
            found = getattr(importlib.import_module(module), name, None)
        known = set(_names(found)) if inspect.isclass(found) else set[str]()
        gone += [f"{name}.{field}" for field in names.split() if field not in known]
    return gone


def _names(found: type) -> Iterator[str]:
    """Yield the names of methods and annotations, and of what methods assign to `self`, of a class and its bases."""
    yield from dir(found)
    for base in found.__mro__[:-1]:
        yield from getattr(base, "__annotations__", {})
        yield from _assigned(base.__module__).get(base.__name__, ())


@cache
def _assigned(module: str) -> dict[str, set[str]]:
    """Return what the methods of each class of a module assign to `self`."""
    path = importlib.import_module(module).__file__
    classes = ast.parse(Path(path).read_text()).body if path else []
    return {
        each.name: {
            node.attr
            for node in ast.walk(each)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
        }
        for each in classes
        if isinstance(each, ast.ClassDef)
    }


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
