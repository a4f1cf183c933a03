"""`batchweave plan` on files as people write them, good and bad."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from batchweave.table import command_line
from engine_ext.plan.buckets import LONGEST
from service.demo.tiny import ensure_tiny_model
from service.errors import WorkloadError
from service.requests.tokens import PromptTokens
from service.workloads.workload import read_lengths, read_workload

PLAIN = {"segments": [["system", 100], ["a", 50]], "output_tokens": 20}
KEYS = {
    "requests",
    "prompt_tokens",
    "sharing",
    "sharing_kept",
    "density",
    "t_comp_s",
    "t_mem_s",
    "t_ideal_s",
    "planning_s",
    "peak_rss_bytes",
}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def plan(*arguments: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(command_line("plan"), ["plan", *(str(each) for each in arguments)])
    return found.exit_code, found.stdout, found.stderr


def batch_line(number: int, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, **body},
    }


def test_figures_of_a_workload_file(tmp_path: Path) -> None:
    lines = [
        {"segments": [["system", 300], [n, 100]], "output_tokens": 50, "id": f"q{n}", "tenant": "a"} for n in range(10)
    ]
    code, out, _ = plan(write(tmp_path / "w.jsonl", lines), "--gpu", "a100-80gb", "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) >= KEYS
    assert (found["requests"], found["prompt_tokens"]) == (10, 4000)
    assert found["prompt_sharing"] == pytest.approx(9 * 300 / 4000)
    assert found["t_ideal_s"] == pytest.approx(max((1 - found["sharing"]) * found["t_comp_s"], found["t_mem_s"]))
    assert found["density"] == pytest.approx((1 - found["sharing"]) * found["t_comp_s"] / found["t_mem_s"])
    assert found["sharing_kept"] == pytest.approx(1)


def test_order_and_picture_are_written(tmp_path: Path) -> None:
    lines = [{**PLAIN, "segments": [["s", 10], [n, 5 + n]], "output_tokens": 1 + n * 7, "id": n} for n in range(50)]
    order, picture = tmp_path / "order.jsonl", tmp_path / "plan.png"
    code, out, _ = plan(write(tmp_path / "w.jsonl", lines), "--dp", 2, "--output", order, "--plot", picture)
    assert code == 0
    assert "shared prefixes" in out
    rows = [json.loads(line) for line in order.read_text().splitlines()]
    assert sorted(int(row["id"]) for row in rows) == list(range(50))
    assert [row["replica"] for row in rows] == sorted(row["replica"] for row in rows)
    assert {row["side"] for row in rows} == {"left", "right"}
    assert {row["output_tokens"] for row in rows} == {1 + n * 7 for n in range(50)}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sample_is_all_that_is_known(tmp_path: Path) -> None:
    lines = [
        {**PLAIN, "segments": [["s", 10], [n, 50]], "output_tokens": 200 + n % 200, "max_tokens": 900}
        for n in range(400)
    ]
    path = write(tmp_path / "w.jsonl", lines)
    known, sampled = (json.loads(plan(path, "--json", *more)[1]) for more in ((), ("--sample", "0.05")))
    assert known["output_tokens"] == sum(200 + n % 200 for n in range(400))
    assert sampled["output_tokens"] != known["output_tokens"]
    assert sampled["output_tokens"] == pytest.approx(known["output_tokens"], rel=0.1)


def test_batch_file_by_bytes_and_by_the_models_own_tokens(tmp_path: Path) -> None:
    shared = "The same long instruction stands before every question. " * 20
    path = write(tmp_path / "b.jsonl", [batch_line(n, f"{shared}Question {n}?", max_tokens=64) for n in range(20)])
    model = tmp_path / "model"
    ensure_tiny_model(model, [shared])
    for name in ("llama-3-8b", str(model)):
        code, out, error = plan(path, "--model", name, "--json")
        assert code == 0, error
        found = json.loads(out)
        assert found["requests"] == 20
        assert 0.8 < found["prompt_sharing"] < 0.96


def test_what_a_request_says_of_its_answer_is_used(tmp_path: Path) -> None:
    lines = [
        batch_line(1, "a", max_tokens=100, ignore_eos=True),
        batch_line(2, "b", max_completion_tokens=50),
        batch_line(3, "c"),
        batch_line(4, "d", max_tokens=1),
    ]
    found = read_workload(write(tmp_path / "b.jsonl", lines), None, {"r3": 7})
    assert found.outputs.known.tolist() == [100, -1, 7, 1]
    assert found.outputs.caps.tolist() == [100, 50, LONGEST, 1]


def test_lengths_come_from_pairs_or_from_an_output_file(tmp_path: Path) -> None:
    output_line = {"id": "batch_req_1", "custom_id": "r1", "response": {"body": {"usage": {"completion_tokens": 12}}}}
    path = write(tmp_path / "l.jsonl", [{"id": "r0", "output_tokens": 5}, output_line])
    assert read_lengths(path) == {"r0": 5, "r1": 12}
    requests = write(tmp_path / "b.jsonl", [batch_line(n, "x") for n in range(2)])
    code, out, _ = plan(requests, "--lengths", path, "--json")
    assert (code, json.loads(out)["output_tokens"]) == (0, 17)


def test_tenants_share_prefixes_only_where_the_cache_is_shared(tmp_path: Path) -> None:
    lines = [
        {"segments": [["system", 300], [n, 100]], "output_tokens": 50, "id": f"q{n}", "tenant": n % 2}
        for n in range(10)
    ]
    path = write(tmp_path / "w.jsonl", lines)
    apart, shared = (json.loads(plan(path, "--json", *more)[1]) for more in ((), ("--shared-cache",)))
    assert apart["prompt_tokens"] == shared["prompt_tokens"] == 4000
    assert (apart["prompt_sharing"], shared["prompt_sharing"]) == (0.6, 0.675)


def test_tenants_and_deadlines_are_read(tmp_path: Path) -> None:
    lines = [{**PLAIN, "tenant": "b", "deadline_s": 5}, {**PLAIN, "tenant": 7}, PLAIN]
    found = read_workload(write(tmp_path / "w.jsonl", lines), None, {})
    assert len(found.wishes.weights) == 3
    assert found.wishes.deadline_s.tolist() == [5, np.inf, np.inf]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({**PLAIN, "segments": [["a", -5]]}, "line 3: segments: segment 'a' has the length -5"),
        ({**PLAIN, "segments": []}, "line 3: segments is empty"),
        ({**PLAIN, "segments": [["system", 99]]}, r"line 3: segments: .*but 100 before.*\(line 1\)"),
        ({**PLAIN, "max_tokens": 5}, "line 3: output_tokens 20 is above max_tokens 5"),
        ({**PLAIN, "id": 0}, "line 3: id '0' is already on line 1"),
        ("[" * 100_000, "line 3: "),
        ({**PLAIN, "output_tokens": -1}, "line 3: output_tokens must be at least 0"),
        ({**PLAIN, "max_tokens": 0}, "line 3: max_tokens must be at least 1"),
        ({**PLAIN, "deadline_s": -2}, "line 3: deadline_s must be at least 0"),
        ({**PLAIN, "output_tokens": "many"}, r"line 3: .*\$\.output_tokens"),
        ({"segments": [["a", 1]]}, "line 3: .*output_tokens"),
        ({**PLAIN, "ouput": 1}, "line 3: .*ouput"),
        ({**PLAIN, "segments": [["a", 1 << 40]]}, "line 3: .*longer than"),
        ("{not json", "line 3: "),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, problem: str) -> None:
    path = write(tmp_path / "w.jsonl", [PLAIN, "", line])
    with pytest.raises(WorkloadError, match=problem):
        read_workload(path, None, {})
    code, out, error = plan(path)
    assert (code, out) == (1, "")
    assert "line 3" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "h900"], "no hardware 'h900'"),
        (["--gpu", "machine.json"], "machine.json"),
        (["--model", "llama-9"], "no model 'llama-9'"),
        (["--model", "llama-3-70b", "--gpu", "a100-80gb"], "raise tp"),
        (["--gpu", "a100-80gb", "--dtype", "fp8"], "no fp8 arithmetic"),
        (["--keep", "3"], "from 0 to 1"),
        (["--plot", "plan.jpeg"], "must end in one of .png"),
        (["--output", "nowhere/order.jsonl"], "no such folder"),
        (["--model", "./nowhere"], "no such file"),
        (["--sample", "2"], "share to sample"),
        (["--lengths", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, arguments: list[str], problem: str) -> None:
    code, _, error = plan(write(tmp_path / "w.jsonl", [PLAIN]), *arguments)
    assert code == 1
    assert problem in error


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in plan(tmp_path / "none.jsonl")[2]
    assert "has no requests" in plan(write(tmp_path / "empty.jsonl", [""]))[2]


def test_a_batch_line_with_a_fault_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", [batch_line(1, "a"), batch_line(1, "b")])
    assert "line 2: id 'r1' is already on line 1" in plan(path)[2]


def test_a_config_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 64}')
    code, _, error = plan(write(tmp_path / "w.jsonl", [PLAIN]), "--model", config)
    assert code == 1
    assert "num_hidden_layers" in error


def test_a_calibrated_machine_is_planned_for(tmp_path: Path) -> None:
    machine = {"name": "mine", "flops": {"bf16": 156e12}, "bandwidth": 2.039e12, "memory_bytes": 80e9}
    path = write(tmp_path / "w.jsonl", [PLAIN])
    calibrated = tmp_path / "mine.json"
    calibrated.write_text(json.dumps(machine))
    half, whole = (json.loads(plan(path, "--gpu", gpu, "--json")[1]) for gpu in (calibrated, "a100-80gb"))
    assert half["density"] == pytest.approx(2 * whole["density"])
    for field in ("flops", "bandwidth"):
        calibrated.write_text(json.dumps({key: value for key, value in machine.items() if key != field}))
        assert f"'{field}'" in plan(path, "--gpu", calibrated)[2]
    calibrated.write_text(json.dumps({**machine, "bandwidth": "fast"}))
    assert "'bandwidth'" in plan(path, "--gpu", calibrated)[2]


def test_prompts_by_bytes_share_equal_beginnings(tmp_path: Path) -> None:
    found = read_workload(write(tmp_path / "b.jsonl", [batch_line(n, "equal " * 40) for n in range(2)]), None, {})
    a, b = found.prompts[0], found.prompts[1]
    assert a.tolist() == b.tolist()
    text = PromptTokens(None, None, {}).text("/v1/chat/completions", batch_line(0, "equal " * 40)["body"]).string
    assert len(a) == -(-len(text) // 4)


def test_what_is_read_is_never_written(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", [PLAIN])
    before = path.read_bytes()
    assert "is an input file" in plan(path, "--output", path)[2]
    assert path.read_bytes() == before


def test_prompts_of_token_ids_are_counted_as_such(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": [7] * 1000}}
    assert json.loads(plan(write(tmp_path / "b.jsonl", [line]), "--json")[1])["prompt_tokens"] == 1000


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        pool.submit(write, pipe, [PLAIN, {**PLAIN, "id": "b"}])
        assert len(read_workload(pipe, None, {}).ids) == 2


def test_lengths_that_match_nothing_or_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", [PLAIN])
    assert "none of the 1 ids" in plan(path, "--lengths", write(tmp_path / "l", [{"id": "x", "output_tokens": 1}]))[2]
    for answer in (
        {"id": "0", "output_tokens": 1 << 60},
        {"id": "0", "output_tokens": 10**30},
        {"custom_id": "0", "response": {"body": [1]}},
        {"custom_id": "0", "response": {"body": {"usage": "none"}}},
        {"custom_id": "0", "response": {"body": {"usage": {"completion_tokens": True}}}},
    ):
        code, _, error = plan(path, "--lengths", write(tmp_path / "l", [answer]))
        assert (code, "line 1" in error) == (1, True), error
    failed = {"custom_id": "1", "response": {"status_code": 500, "body": {"error": {}}}}
    assert plan(path, "--lengths", write(tmp_path / "l", [failed, {"id": "0", "output_tokens": 4}]))[0] == 0


def test_hours_are_those_of_the_busiest_replica(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", [PLAIN])
    one, many = (json.loads(plan(path, "--json", "--dp", dp)[1]) for dp in (1, 8))
    assert many["hours_ideal"] == pytest.approx(one["hours_ideal"])


def test_deadlines_that_cannot_be_met_and_prompts_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    lines = [
        {"segments": [["a", 1000]], "output_tokens": 100, "deadline_s": 0},
        {"segments": [["b", 1_000_000]], "output_tokens": 10},
    ]
    found = json.loads(plan(write(tmp_path / "w.jsonl", lines), "--gpu", "l40s", "--json")[1])
    assert (found["late_requests"], found["too_long_requests"]) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"first_k_dense_replace": 100, "n_routed_experts": 8, "num_experts_per_tok": 2}, "first_k_dense_replace"),
        ({"n_shared_experts": "2", "n_routed_experts": 8, "num_experts_per_tok": 2}, "n_shared_experts"),
        ({"num_attention_heads": 8192}, "more than hidden_size"),
        ({"text_config": 5}, "text_config"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
    ],
)
def test_configs_that_cannot_be_counted_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        **changes,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, _, error = plan(write(tmp_path / "w.jsonl", [PLAIN]), "--model", path)
    assert code == 1
    assert problem in error


def test_a_tokenizer_that_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    model = ensure_tiny_model(tmp_path / "model", ["some text"] * 8)
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    code, _, err = plan(write(tmp_path / "b.jsonl", [batch_line(0, "hi")]), "--model", model)
    assert (code, err.count("\n")) == (1, 1)
    assert "chat template cannot be read" in err


@pytest.mark.parametrize(("requests", "is_small"), [(3, True), (20_000, False)])
def test_a_plan_says_when_its_file_is_too_small_to_tell(tmp_path: Path, requests: int, is_small: bool) -> None:
    path = tmp_path / "workload.jsonl"
    line = json.dumps({"segments": [["a", 900]], "output_tokens": 40})
    path.write_text(f"{line}\n" * requests)
    found = CliRunner().invoke(command_line("plan"), ["plan", str(path), "--gpu", "h100"])
    assert found.exit_code == 0
    assert ("too small" in found.stdout) == is_small
