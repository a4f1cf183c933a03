"""How prefill and decodes share a GPU: what is chosen where it cannot be had, and how SMs are split."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.multiplex.pdmux_context import divide_sm

from engine_ext.plugin.options import Overlap
from engine_ext.plugin.scheduler import pdmux
from engine_ext.plugin.worker import overlap
from service.errors import SettingsError
from service.estimates.model_costs import OVERLAPS
from service.settings import load_settings


def test_the_service_names_what_the_plugin_has() -> None:
    assert list(OVERLAPS) == [each.value for each in Overlap]
    for name in OVERLAPS:
        assert load_settings(overlap=name).overlap == name
    with pytest.raises(SettingsError, match="BATCHWEAVE_OVERLAP"):
        load_settings(overlap="warp")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "gpu_is_present", lambda: False)


def test_without_a_gpu_nothing_overlaps_unless_it_is_asked_for(no_gpu: None) -> None:
    assert overlap.choose(None, "anything", {"enable_mixed_chunk": True}) is Overlap.MIXED
    assert overlap.choose(None, "anything", {}) is Overlap.NONE
    assert overlap.choose(Overlap.MIXED, "anything", {}) is Overlap.MIXED


def test_what_cannot_be_had_gives_way_to_the_next_best_and_the_log_says_why(
    no_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert overlap.choose(Overlap.PDMUX, "anything", {}) is Overlap.MIXED
        assert overlap.choose(Overlap.PDMUX, "anything", {"chunked_prefill_size": -1}) is Overlap.NONE
        assert overlap.choose(Overlap.MIXED, "anything", {"speculative_algorithm": "EAGLE"}) is Overlap.NONE
    said = [record.getMessage() for record in caplog.records]
    assert "'pdmux' is not possible here, using 'mixed' instead: there is no GPU" in said[0]
    assert "chunked prefill off" in said[2]
    assert "speculative decoding" in said[3]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU to ask about, which this machine need not have."""
    found = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(overlap, "gpu_is_present", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found.capability)
    monkeypatch.setitem(__import__("sys").modules, "sgl_kernel", SimpleNamespace(spatial=None))
    return found


def model_of(folder: Path, architecture: str) -> str:
    kind = {"LlamaForCausalLM": "llama", "OPTForCausalLM": "opt"}[architecture]
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    folder = folder / kind
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": kind, **shape}))
    return str(folder)


def test_on_a_gpu_chunks_are_mixed_without_a_wish(gpu: Any) -> None:
    assert overlap.choose(None, "anything", {}) is Overlap.MIXED


def test_pd_multiplexing_needs_a_model_that_is_prefilled_by_layers(gpu: Any, tmp_path: Path) -> None:
    assert overlap.choose(Overlap.PDMUX, model_of(tmp_path, "LlamaForCausalLM"), {}) is Overlap.PDMUX
    assert overlap.choose(Overlap.PDMUX, model_of(tmp_path, "OPTForCausalLM"), {}) is Overlap.MIXED


@pytest.mark.parametrize(
    "given",
    [
        {"pp_size": 2},
        {"enable_dp_attention": True},
        {"disable_overlap_schedule": False},
        {"chunked_prefill_size": 4096},
        {"disaggregation_mode": "prefill"},
        {"capability": (10, 0)},
    ],
)
def test_pd_multiplexing_gives_way_to_what_it_cannot_go_with(gpu: Any, tmp_path: Path, given: dict[str, Any]) -> None:
    gpu.capability = given.get("capability", gpu.capability)
    arguments = {name: value for name, value in given.items() if name != "capability"}
    assert overlap.choose(Overlap.PDMUX, model_of(tmp_path, "LlamaForCausalLM"), arguments) is Overlap.MIXED


def test_the_split_follows_the_work_that_remains() -> None:
    splits = divide_sm(132, (9, 0), 6)  # an H200's, as SGLang divides them
    chosen = [splits[pdmux.best_split(splits, compute, 1.0)] for compute in (0.1, 1.0, 2.0, 4.0)]
    prefill = [split[0] for split in chosen]
    assert prefill == sorted(prefill)
    assert prefill[0] == min(split[0] for split in splits)
    assert prefill[-1] == max(split[0] for split in splits)
    assert pdmux.best_split([(66, 66), (112, 20)], 0.0, 1.0) == 0


def test_decodes_beside_a_prefill_are_counted_for_the_scan() -> None:
    ours = SimpleNamespace(decoded=0)
    scheduler = SimpleNamespace(batchweave_admission=ours)
    for mode in (ForwardMode.DECODE, ForwardMode.SPLIT_PREFILL, ForwardMode.DECODE):
        pdmux.run_batch(lambda scheduler, batch: None, scheduler, SimpleNamespace(forward_mode=mode))
    assert ours.decoded == 2


def test_an_abort_ends_what_is_prefilled_beside_decodes() -> None:
    def req(rid: str) -> Any:
        return SimpleNamespace(rid=rid, to_finish=None, finished=lambda: False)

    mine, other = req("mine"), req("other")
    scheduler = SimpleNamespace(split_prefill_batch=SimpleNamespace(reqs=[mine, other]))
    pdmux.abort(lambda scheduler, recv: None, scheduler, SimpleNamespace(rid="mine", abort_all=False))
    assert isinstance(mine.to_finish, FINISH_ABORT)
    assert other.to_finish is None
    assert not pdmux.is_fully_idle(lambda scheduler: True, scheduler)
    scheduler.split_prefill_batch = None
    assert pdmux.is_fully_idle(lambda scheduler: True, scheduler)
