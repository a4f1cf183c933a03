"""Which batches can leave decodes out of a step; test_online.py shows that nobody's answer changes."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.radix_cache import RadixCache

from engine_ext.plugin.scheduler.resting import can_rest, correct_positions


@pytest.mark.parametrize(
    ("unusual", "rests"),
    [
        ({}, True),
        ({"multimodal_inputs": [None, None]}, True),
        ({"multimodal_inputs": [None, object()]}, False),
        ({"return_logprob": True}, False),
        ({"spec_info": object()}, False),
        ({"is_empty": lambda: True}, False),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, False),
        ({"penalties": True}, False),
        ({"processors": True}, False),
        ({"adapters": True}, False),
        ({"cache": object()}, False),
    ],
)
def test_what_cannot_be_divided_does_not_rest(unusual: dict[str, Any], rests: bool) -> None:
    cache = unusual.pop("cache", None) or object.__new__(RadixCache)
    scheduler = SimpleNamespace(tree_cache=cache, enable_lora=unusual.pop("adapters", False))
    sampling = SimpleNamespace(
        penalizer_orchestrator=SimpleNamespace(is_required=unusual.pop("penalties", False)),
        has_custom_logit_processor=unusual.pop("processors", False),
    )
    ordinary = {
        "is_empty": lambda: False,
        "sampling_info": sampling,
        "return_logprob": False,
        "spec_info": None,
        "multimodal_inputs": None,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
    }
    assert can_rest(scheduler, SimpleNamespace(**ordinary | unusual)) == rests


def test_positions_follow_the_tokens_in_the_kv_cache() -> None:
    """SGLang has the second decode's one too far, because it takes its last token to be computed still."""
    import torch

    batch = SimpleNamespace(prefix_lens=[0, 64, 30, 41])
    correct_positions(None, batch, SimpleNamespace(reqs=[object(), object()], seq_lens_cpu=torch.tensor([31, 41])))
    assert batch.prefix_lens == [0, 64, 30, 40]
