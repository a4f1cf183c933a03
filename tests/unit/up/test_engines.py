"""Which GPUs the engines of one machine get."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.errors import StartError
from service.estimates.gpus import Gpu, machine_gpus
from service.settings import Settings
from service.up.engines import Engine, engines_of, weight_bytes
from service.up.supervisor import Supervisor

H100 = 80 * 2**30
LLAMA_70B = 141 * 10**9  # 70 billion parameters in 16 bits


def gpus(count: int, memory: int | None = H100) -> Callable[[], list[Gpu]]:
    return lambda: [Gpu(str(number), memory) for number in range(count)]


def settings(**given: Any) -> Settings:
    fields: dict[str, Any] = {"model": "someone/llama", **given}
    return Settings(**fields)


def no_weights(_: str) -> None:
    return None


def groups(*given: Any, **more: Any) -> list[str]:
    found = engines_of(*given, **{"weights": no_weights, **more}).engines
    return [",".join(each.gpus or ()) for each in found]


def test_each_gpu_has_an_engine() -> None:
    assert groups([settings()], there=gpus(8)) == list("01234567")
    assert groups([settings()], "4,6", there=gpus(8)) == ["4", "6"]
    assert groups([settings()], None, 3, there=gpus(8)) == ["0", "1", "2"]
    assert groups([settings()], there=gpus(1)) == ["0"]


def test_an_engine_of_several_gpus_has_neighbours_and_what_is_left_is_said() -> None:
    four = settings(engine_args={"tp_size": 2, "pp_size": 2})
    assert groups([four], there=gpus(8)) == ["0,1,2,3", "4,5,6,7"]
    found = engines_of([settings(engine_args={"tp_size": 3})], None, None, gpus(8))
    assert found.said == ("GPUs 6, 7 stay free",)
    for own in ({"base_gpu_id": 2}, {"dp_size": 2}):
        assert groups([settings(engine_args=own)], there=gpus(4)) == ["0,1,2,3"]


def test_without_gpus_there_is_one_engine_or_as_many_as_asked() -> None:
    assert engines_of([settings()], there=gpus(0)).engines == (Engine(0, None),)
    assert engines_of([settings()], None, 2, gpus(0)).engines == (Engine(0, None), Engine(1, None))
    assert engines_of([settings()], "none", 2, gpus(8)).engines == (Engine(0, ()), Engine(1, ()))
    for own in ({"engine": "scripted"}, {"emulated_device": "no answer is real"}):
        assert engines_of([settings(**own)], None, 3, gpus(8)).engines == tuple(Engine(each) for each in range(3))


def test_a_model_that_is_too_large_for_a_gpu_gets_as_few_as_hold_it() -> None:
    found = engines_of([settings()], None, None, gpus(8), lambda _: LLAMA_70B)
    assert [each.gpus for each in found.engines] == [("0", "1", "2", "3"), ("4", "5", "6", "7")]
    assert found.models[0].changes == {"tp_size": 4}
    assert found.said == ("someone/llama has 141 GB of weights, and a GPU 86 GB: each engine takes 4 GPUs (tp_size 4)",)
    with pytest.raises(StartError, match=r"141 GB of weights.*it takes 4 GPUs, and there are 2\. Choose a smaller"):
        engines_of([settings()], None, None, gpus(2), lambda _: LLAMA_70B)
    two = [Gpu("0", H100), Gpu("1", 24 * 10**9 + 10**9)]
    with pytest.raises(StartError, match=r"a GPU 25 GB \(the smallest; --gpus names the larger ones\): it takes 4"):
        engines_of([settings()], None, None, lambda: two, lambda _: 40 * 10**9)
    own = engines_of([settings(engine_args={"tp_size": 2})], None, None, gpus(8), lambda _: LLAMA_70B)
    assert (len(own.engines), own.models[0].changes) == (4, {})
    assert not engines_of([settings()], None, None, gpus(8, None), lambda _: LLAMA_70B).models[0].changes


def test_several_models_take_turns_at_the_gpus() -> None:
    large, small = settings(), settings(model="someone/bge")

    def dealt(count: int, engines: int | None = None) -> list[tuple[int, str]]:
        sizes = {"someone/llama": LLAMA_70B, "someone/bge": 10**9}
        found = engines_of([small, large], None, engines, gpus(count), lambda source: sizes[source])
        assert [each.number for each in found.engines] == list(range(len(found.engines)))
        return [(each.model, ",".join(each.gpus or ())) for each in found.engines]

    assert dealt(5) == [(0, "4"), (1, "0,1,2,3")]
    assert dealt(8) == [(0, "4"), (0, "5"), (0, "6"), (0, "7"), (1, "0,1,2,3")]
    assert dealt(10) == [(0, "8"), (0, "9"), (1, "0,1,2,3"), (1, "4,5,6,7")]
    assert dealt(8, 1) == [(0, "4"), (1, "0,1,2,3")]
    with pytest.raises(StartError, match="2 models: they take 5 GPUs, and there are 4"):
        dealt(4)
    assert engines_of([small, large], None, 2, gpus(0)).engines == (
        *(Engine(0), Engine(1)),
        *(Engine(2, None, 1), Engine(3, None, 1)),
    )
    with pytest.raises(StartError, match="for one engine of one model alone"):
        engines_of([settings(engine_args={"dp_size": 2})] * 2, there=gpus(4))


@pytest.mark.parametrize(
    ("chosen", "engines", "message"),
    [
        ("0,x", None, "give numbers such as 0,1,2,3, or 'none'"),
        ("", None, "give numbers"),
        ("1,1", None, "named twice"),
        ("0,9", None, "there is no GPU 9; this machine has 0, 1"),
        (None, 3, "they take 3 GPUs, and there are 2"),
        (None, 0, "from 1 to 64"),
    ],
)
def test_what_cannot_be_is_said(chosen: str | None, engines: int | None, message: str) -> None:
    with pytest.raises(StartError, match=message):
        engines_of([settings()], chosen, engines, gpus(2), no_weights)


def test_too_few_gpus_for_an_engine_are_said() -> None:
    with pytest.raises(StartError, match=r"takes 4 GPUs .* and there are 2"):
        engines_of([settings(engine_args={"tp_size": 4})], None, None, gpus(2), no_weights)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nprintf '0, 81559, GPU-a, NVIDIA H200\\n1, 81559, GPU-b, NVIDIA H200\\n2, [N/A], GPU-c, X\\n'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_nvidia_smi_says_which_gpus_there_are(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 81559 * 2**20
    assert machine_gpus() == [Gpu("0", memory, "NVIDIA H200"), Gpu("1", memory, "NVIDIA H200"), Gpu("2", None, "X")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-8f3c,GPU-a")
    known = [Gpu(name, memory, "NVIDIA H200") for name in ("1", "GPU-a")]
    assert machine_gpus() == [known[0], Gpu("GPU-8f3c"), known[1]]
    for visible, names in (("0,-1,1", "0"), ("-1", ""), ("NoDevFiles", ""), ("", ""), ("1,1,0", "10"), ("7", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "".join(each.name for each in machine_gpus()) == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\n")
    assert machine_gpus() == []
    nvidia_smi.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    assert machine_gpus() == []


def test_the_size_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    assert weight_bytes(str(tmp_path)) is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert weight_bytes(str(tmp_path)) == 1000
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 5000}}))
    assert weight_bytes(str(tmp_path)) == 5000
    index.write_text("[]")
    assert weight_bytes(str(tmp_path)) is None


def test_each_worker_has_its_gpus_name_ports_and_log(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    given = settings(
        data_dir=tmp_path,
        steps_file=steps,
        metrics_port=9100,
        online_port=9200,
        worker_name="w",
        engine_args={"page_size": 16},
    )
    engines = engines_of([given], None, None, gpus(8), lambda _: LLAMA_70B)
    supervisor = Supervisor(engines, print)
    parts = [supervisor._worker(each, tmp_path) for each in engines.engines]  # pyright: ignore[reportPrivateUsage]
    assert [(part.name, part.worker, part.log_path.name) for part in parts] == [
        ("worker-0", "w-0", "worker-0.log"),
        ("worker-1", "w-1", "worker-1.log"),
    ]
    assert [part.changes["CUDA_VISIBLE_DEVICES"] for part in parts] == ["0,1,2,3", "4,5,6,7"]
    assert {part.changes["BATCHWEAVE_ENGINE_ARGS"] for part in parts} == {'{"page_size": 16, "tp_size": 4}'}
    assert [part.changes.get("BATCHWEAVE_METRICS_PORT") for part in parts] == [None, "9102"]
    assert [part.changes.get("BATCHWEAVE_STEPS_FILE") for part in parts] == [None, str(tmp_path / "steps-1.jsonl")]
    assert [part.changes.get("BATCHWEAVE_ONLINE_PORT") for part in parts] == [None, "9201"]
