"""`batchweave demo`: real answers of a real model, which are those of transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

COMPARED = 20  # answers
GAP = 0.2  # of logits, by which the token of an answer may be below the best


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The data folder of a demo that has run, and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "data"
    command = [sys.executable, "-m", "batchweave", "demo", "--data-dir", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert found.returncode == 0, found.stdout + found.stderr
    return folder, found.stderr + found.stdout


def lines_of(path: Path) -> dict[str, Any]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_the_demo_prints_answers_that_a_person_can_read(demo: tuple[Path, str]) -> None:
    folder, said = demo
    asked, answered = lines_of(folder / "requests.jsonl"), lines_of(folder / "results.jsonl")
    assert set(asked) == set(answered)
    texts = {each: line["response"]["body"]["choices"][0]["message"]["content"] for each, line in answered.items()}
    for kind in ("question-1-1", "summary-1", "extract-1"):
        assert f"{kind}: " in said
    assert "700 litres" in texts["question-1-1"]
    assert texts["question-1-1"] in said
    for each, text in texts.items():
        if each.startswith("extract"):
            found = json.loads(text)
            assert set(found) == {"product", "needs_reply"}
            assert isinstance(found["needs_reply"], bool)
        if each.startswith("label"):
            assert text in ("complaint", "question", "thanks")


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_greedy_answers_are_those_of_transformers(demo: tuple[Path, str]) -> None:
    """Each token of an answer is the most likely one, or lies so close that rounding decides."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = demo
    asked, answered = lines_of(folder / "requests.jsonl"), lines_of(folder / "results.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folder / "demo-model")
    model = AutoModelForCausalLM.from_pretrained(folder / "demo-model", dtype=torch.float32).eval()
    compared = [each for each in asked if each.startswith(("question", "label"))]
    tokens = best = 0
    for each in compared[:: len(compared) // COMPARED][:COMPARED]:
        prompt = tokenizer.apply_chat_template(asked[each]["body"]["messages"], add_generation_prompt=True)["input_ids"]
        text = answered[each]["response"]["body"]["choices"][0]["message"]["content"]
        answer = tokenizer.encode(text)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(dim=1).values - logits[range(len(answer)), answer]
        assert gaps.max() <= GAP, (each, text, gaps)
        tokens, best = tokens + len(answer), best + int((gaps == 0).sum())
    assert best >= 0.95 * tokens
