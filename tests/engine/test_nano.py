"""Steps in two halves: where a step is cut, how the halves take turns, and that no answer changes."""

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from safetensors.torch import load_file, save_file
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmarks.engine.bench_engine import BenchEngine
from benchmarks.engine.tuning import Tuning
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.options import Options, Overlap
from engine_ext.plugin.scheduler import nano
from engine_ext.plugin.worker import overlap
from tests.engine.conftest import running_bench
from tests.engine.test_real_scan import CAPACITY, CHUNK, Requests, both_ends, documents, giant, run_within

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))


def seconds(tokens: list[int], contexts: list[int]) -> tuple[float, float]:
    """Of a half's GEMM, which reads all the weights, and of its reads."""
    return max(COST.weights_s, sum(tokens) * COST.gemm_s_per_token), sum(contexts) * COST.read_s_per_token


def test_a_step_is_cut_where_it_ends_soonest() -> None:
    tokens, contexts = [2048, 1024] + [1] * 200, [2048, 4096] + [3000] * 200

    def time(cut: int) -> float:
        (gemm_a, reads_a), (gemm_b, reads_b) = (
            seconds(tokens[:cut], contexts[:cut]),
            seconds(tokens[cut:], contexts[cut:]),
        )
        return max(gemm_a, reads_b) + max(gemm_b, reads_a)

    best = nano.best_cut(tokens, contexts, COST)
    assert time(best) == min(time(cut) for cut in range(1, len(tokens)))
    assert time(best) < 1.05 * max(seconds(tokens, contexts))


@pytest.mark.parametrize(
    ("tokens", "contexts"),
    [
        ([8192], [8192]),  # nothing to cut
        ([4096, 4096], [0, 0]),  # nothing to hide
        ([10, 1, 1, 1], [10, 20, 20, 20]),  # half as many tokens read all the weights too
    ],
)
def test_a_step_stays_whole_where_halves_would_take_longer(tokens: list[int], contexts: list[int]) -> None:
    assert nano.best_cut(tokens, contexts, COST) == 0


def test_halves_take_turns_at_their_attention() -> None:
    events: list[str] = []

    def half(name: str) -> Any:
        backend = nano.HalfBackend(
            SimpleNamespace(forward=lambda layer: events.append(f"{name} attends {layer}")), None
        )

        def run() -> str:
            for layer in range(2):
                events.append(f"{name} multiplies {layer}")
                backend.forward(layer)
            return name

        return None, run

    assert nano.in_turns([half("a"), half("b")]) == ["a", "b"]
    assert events == [
        f"{name} {does} {layer}" for layer in range(2) for name in "ab" for does in ("multiplies", "attends")
    ]


def test_a_fault_in_one_half_is_the_steps_fault() -> None:
    def fails() -> None:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        nano.in_turns([(None, lambda: 1), (None, fails)])


def test_what_sglang_cannot_split_runs_whole_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nano, "mine", lambda: Options(COST, overlap=Overlap.NANO))
    monkeypatch.setattr(nano, "best_cut", lambda *_: 1)
    monkeypatch.setattr(nano, "books", nano.Books())
    caplog.set_level("WARNING", nano.log.name)  # an engine that another test started logs errors only
    refuses = SimpleNamespace(
        forward_mode=ForwardMode.MIXED,
        extend_seq_lens_cpu=[3, 1],
        seq_lens_cpu=SimpleNamespace(tolist=lambda: [3, 9]),
        batch_size=2,
        input_ids=SimpleNamespace(shape=[5]),  # not the four tokens that the requests have
    )
    model = SimpleNamespace(layers_to_capture=[])

    for _ in range(2):
        assert nano.forward(lambda *given: "whole", model, None, None, refuses) == "whole"

    assert nano.books.split == 0
    assert nano.books.resting == nano.REST - 1
    assert [record.getMessage()[:30] for record in caplog.records] == ["steps like this one run whole,"]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"pp_size": 2}, "pipeline"),
        ({"enable_dp_attention": True}, "data-parallel"),
        ({"enable_lora": True}, "LoRA"),
        ({"cpu_offload_gb": 4}, "offloaded"),
        ({"disable_prefill_cuda_graph": False}, "CUDA graphs"),
    ],
)
def test_what_halves_cannot_go_with(demo: Path, given: dict[str, Any], word: str) -> None:
    assert word in (overlap.against(Overlap.NANO, str(demo), given) or "")
    assert overlap.choose(Overlap.NANO, str(demo), given) is Overlap.MIXED
    assert overlap.choose(Overlap.NANO, str(demo), {}) is Overlap.NANO


TRIES = 5  # what rides together depends on when a plan is ready, and few steps here are worth two halves


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, demo: Path, tmp_path: Path) -> Path:
    """The demo's Llama, and the same weights as a Qwen 2 with biases and a Qwen 3 with norms of queries and keys."""
    return demo if request.param == "llama" else as_qwen(demo, tmp_path / request.param, request.param)


def as_qwen(demo: Path, folder: Path, kind: str) -> Path:
    import torch

    shutil.copytree(demo, folder)
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    config |= {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
    config |= {"head_dim": config["hidden_size"] // heads, "attention_bias": False, "use_sliding_window": False}
    (folder / "config.json").write_text(json.dumps(config))
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    generator = torch.Generator().manual_seed(7)
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        for part in "qkv":
            like = weights[f"{attention}.{part}_proj.weight"]
            if kind == "qwen2":
                bias = torch.randn(like.shape[0], generator=generator) / 10
                weights[f"{attention}.{part}_proj.bias"] = bias.to(like.dtype)
            elif part != "v":
                weights[f"{attention}.{part}_norm.weight"] = torch.ones(config["head_dim"], dtype=like.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def run(model: Path, log: Path) -> Generator[Any, None, None]:
    """An engine with halves that runs requests, in chunks mixed with decodes or not."""
    small = {"max_total_tokens": CAPACITY, "chunked_prefill_size": CHUNK, "max_running_requests": 32}
    with running_bench(model, Overlap.NANO, small, log) as engine:

        def of(requests: Requests, mixed: bool) -> dict[str, Any]:
            found = engine.do(run_within, Tuning(None if mixed else "fcfs", CHUNK, mixed=mixed), requests)
            return found | {"state": engine.do(BenchEngine.state)}

        yield of


@pytest.mark.slow
def test_answers_are_those_of_whole_steps(run: Any, model: Path) -> None:
    """Qwen's layers differ from Llama's, and what is scheduled does not: one workload is enough for them."""
    config, split = json.loads((model / "config.json").read_text()), 0
    turns = 2 * config["num_hidden_layers"]  # each half gives its turn away at each attention
    for workload in (both_ends, documents, giant) if config["model_type"] == "llama" else (both_ends,):
        requests = workload()
        whole, halves = run(requests, mixed=False), run(requests, mixed=True)
        for _ in range(TRIES):
            assert halves["answers"] == whole["answers"]
            if halves["state"]["nano_steps"] > split:
                break
            halves = run(requests, mixed=True)
        assert halves["overlap"] == "nano"
        assert halves["state"]["nano_refused"] is None
        assert whole["state"]["nano_steps"] == split
        assert halves["state"]["nano_steps"] > split
        split = halves["state"]["nano_steps"]
        assert halves["state"]["nano_turns"] == turns * split
