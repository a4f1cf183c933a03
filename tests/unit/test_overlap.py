"""How prefill and decodes share a GPU: what is chosen where it cannot be had, and how SMs are split."""

import json
import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.multiplex.pdmux_context import divide_sm

from engine_ext.plan.cost import CostModel
from engine_ext.plan.hardware import Machine, hardware
from engine_ext.plan.model_shape import preset
from engine_ext.plugin import overlap, pdmux
from engine_ext.plugin.calibration_load import Limits, blend
from engine_ext.plugin.options import Overlap
from service.calibration import compare
from service.model_costs import OVERLAPS, CostsError, measured_overlap
from service.settings import SettingsError, load_settings


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
    assert "'pdmux' is not possible here, 'mixed' is used: there is no GPU" in said[0]
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


def test_an_engine_that_fails_is_left_out_of_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {"none": '{"seconds": 4.0}', "mixed": '{"seconds": 2.5}', "pdmux": '{"seconds": null}'}
    passed: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        passed.append(command)
        if command[3] == "mixed":
            raise subprocess.CalledProcessError(-9, command)
        return SimpleNamespace(stdout=f"a line of its own\n{trials[command[3]]}\n")

    monkeypatch.setattr(subprocess, "run", run)
    file, said = tmp_path / "machine.json", list[str]()
    file.write_text('{"name": "x"}')
    assert compare(load_settings(), file, list(trials), said.append) == {"none": 4.0}
    assert json.loads(file.read_text()) == {"name": "x", "overlap": {"fastest": "none", "seconds": {"none": 4.0}}}
    assert passed[2][-2:] == ["--limit-s", "12.0"]
    assert any("mixed: its engine failed" in line for line in said)
    assert any("pdmux: more than 3 times" in line for line in said)


def test_the_blend_computes_as_long_as_it_reads_and_fits() -> None:
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    limits = Limits(context=8192, capacity=400_000, running=256, vocabulary=1000)
    requests = blend(cost, limits, 10.0)
    compute = sum(
        prompt * cost.gemm_s_per_token + prompt**2 * cost.quadratic_s for prompt, few in requests if few < 100
    )
    reads = sum((prompt * many + many**2 / 2) * cost.read_s_per_token for prompt, many in requests if many > 100)
    assert compute == pytest.approx(10.0, rel=0.01)
    assert reads == pytest.approx(10.0, rel=0.01)
    first = requests[: len(requests) // 10]
    assert {many > 100 for _, many in first} == {True, False}  # each kind by turns
    small = Limits(context=300, capacity=400, running=1, vocabulary=50)
    assert all(prompt + output <= 200 for prompt, output in blend(cost, small, 0.01))


def test_workers_use_what_a_calibration_found_fastest(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    assert measured_overlap("h200") is None
    file.write_text("{}")
    assert measured_overlap(str(file)) is None
    file.write_text(json.dumps({"overlap": {"fastest": "mixed", "seconds": {"none": 2.0, "mixed": 1.0}}}))
    assert measured_overlap(str(file)) == "mixed"
    file.write_text(json.dumps({"overlap": {"fastest": "warp"}}))
    with pytest.raises(CostsError, match=r"overlap\.fastest"):
        measured_overlap(str(file))
