"""Which batches can leave decodes out of a step; test_online.py shows that nobody's answer changes."""

import subprocess
import sys
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


def test_no_step_beside_online_requests_compiles_anything() -> None:
    """In a process of its own, for here other tests have compiled much already; a step would take seconds."""
    code = """
import sys
import numpy as np
from types import SimpleNamespace
from engine_ext import warm_up
from engine_ext.coserve.limit import Limits
from engine_ext.coserve.predictor import Load
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.scheduler.beside import Beside
from engine_ext.plugin.scheduler.online import NOBODY
from tests.engine.dividing import divide

def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("engine_ext.")]
    found = {id(each): each for module in modules for each in vars(module).values() if hasattr(each, "signatures")}
    return sum(len(each.signatures) for each in found.values())

class Req(SimpleNamespace):
    sampling_params = SimpleNamespace(custom_params=None)
    __hash__ = object.__hash__

warm_up.compile_coserve()
before = compiled()
model = EngineModel.of_steps(CostModel(preset("llama-3-8b"), Machine(hardware("h200"))), Clock.MIXED).numbers
beside = Beside.of((SloClass(ttft_s=1.0, tpot_s=0.05),), Limits(limit_s=0.005, prompt_tokens=256), model, 1000, 0)
decodes, waits = (Req(origin_input_ids=[1] * 50, output_ids=[1] * tokens, finished_reason=None) for tokens in (5, 0))
for step in range(80):
    now = 0.01 * step
    beside.arrived(decodes, now)
    demand = NOBODY._replace(decoding=[decodes], prompts=[waits], waiting=1, tokens=300 * (step % 2))
    beside.pass_time(demand, now)
    _, rests = divide(beside, demand, now, np.full(9, 90_000), Load(0, 0.0, 0, 1, 55), 256)
    beside.launched(Load(100, 1e4, 1, 1, 55), Load(0, 0.0, 0, 1, 55))
    beside.kept_free
beside.pass_time(NOBODY, now + 0.01)
print(before, compiled(), rests.sum())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    before, after, left_out = map(int, ran.stdout.split())
    assert before > 5
    assert after == before
    assert left_out > 0
