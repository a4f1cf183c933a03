"""LoRA adapters in real SGLang under the dual scan: each answers as the model with its weights merged would."""

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_process import EngineProcess
from service.demo.tiny import NAME
from service.settings import load_settings
from service.worker.engine import with_adapters
from tests.engine.adapters import make_adapter, merged
from tests.engine.conftest import running_engine

SEEDS = {"a": 1, "b": 2, "c": 3}
MODELS = [NAME, *(f"{NAME}:{each}" for each in SEEDS)]
PROMPTS = [[0, 100 + 7 * n, 900, 41 + n, 77] for n in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def engine(demo: Path, folder: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    """An engine with room for two of its four models at a time."""
    paths = {name: str(make_adapter(folder / name, seed)) for name, seed in SEEDS.items()}
    settings = load_settings(model=str(demo), adapters=paths)
    arguments = with_adapters(settings, {"max_running_requests": 32, "max_loras_per_batch": 2})
    with running_engine(demo, arguments, log) as running:
        yield running


async def ask(host: Any, model: str, prompt: list[int], number: int, tokens: int = 1, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    answer = await host.run("/v1/completions", body, f"cmpl-{number:032x}", "kind")
    assert answer.status_code == 200, answer.body
    return json.loads(answer.body)


def firsts(model: Path) -> list[str]:
    """The first token that Transformers answers each prompt with."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found = network(torch.tensor(PROMPTS)).logits[:, -1].argmax(-1)
    return [tokenizer.decode([token]) for token in found.tolist()]


def test_an_adapter_answers_as_its_merged_weights_do(engine: EngineProcess[Any], demo: Path, folder: Path) -> None:
    async def run(host: Any, name: str) -> list[str]:
        answers = [await ask(host, f"{NAME}:{name}", prompt, n) for n, prompt in enumerate(PROMPTS)]
        return [each["choices"][0]["text"] for each in answers]

    base = firsts(demo)
    for name, seed in SEEDS.items():
        wanted = firsts(merged(demo, folder / f"merged-{name}", seed))
        found = engine.do(run, name)
        agreeing = sum(mine == theirs for mine, theirs in zip(found, wanted, strict=True))
        assert agreeing >= 10, f"{found} of {name}, not {wanted}"  # bfloat16 may tip a near tie
        assert sum(mine == theirs for mine, theirs in zip(found, base, strict=True)) < 6


def test_more_adapters_than_fit_at_once_are_all_answered_and_share_no_cache(engine: EngineProcess[Any]) -> None:
    beginning = list(range(200, 456))

    async def run(host: Any) -> dict[str, list[dict[str, Any]]]:
        asked = [(model, n) for n in range(8) for model in MODELS]
        answers = await asyncio.gather(
            *(ask(host, model, [*beginning, 1000 + n], 100 * n + i, 6) for i, (model, n) in enumerate(asked))
        )
        found: dict[str, list[dict[str, Any]]] = {model: [] for model in MODELS}
        for (model, _), answer in zip(asked, answers, strict=True):
            found[model].append(answer)
        return found

    async def alone(host: Any, model: str, n: int) -> str:
        return (await ask(host, model, [*beginning, 1000 + n], 10_000 + n, 6))["choices"][0]["text"]

    found = engine.do(run)
    texts = {model: [each["choices"][0]["text"] for each in answers] for model, answers in found.items()}
    assert len({tuple(each) for each in texts.values()}) == len(MODELS), "each adapter has answers of its own"
    for model, answers in found.items():
        agreeing = sum(engine.do(alone, model, n) == texts[model][n] for n in range(8))
        assert agreeing >= 6, f"{agreeing} of {model}"  # bfloat16 may tip a near tie
        cached = [(each["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for each in answers]
        # About once for each of the scan's ends, and not once for each of the eight requests.
        assert 1 <= sum(tokens < len(beginning) for tokens in cached) <= 4, f"{cached} of {model}"


def test_an_online_request_gets_a_place_for_its_adapter_while_batches_use_all(
    engine: EngineProcess[Any],
) -> None:
    async def run(host: Any) -> int:
        asked = [(model, n) for n in range(40) for model in MODELS[:2]]  # more than run at once
        batch = [
            asyncio.create_task(ask(host, model, [5, 300 + n], 20_000 + 2 * n + i % 2, 60))
            for i, (model, n) in enumerate(asked)
        ]
        await asyncio.wait(batch, return_when=asyncio.FIRST_COMPLETED)
        body = {"model": MODELS[2], "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        answer = await host.serve("/v1/completions", body, f"cmpl-{1:032x}")
        left = sum(not each.done() for each in batch)
        await asyncio.gather(*batch)
        assert answer.status_code == 200
        return left

    assert engine.do(run) > 0


def test_a_client_cannot_write_into_the_cache_of_an_adapter(engine: EngineProcess[Any], folder: Path) -> None:
    from sglang.srt.lora.lora_registry import LoRARef

    prompt = list(range(600, 700))
    adapter = LoRARef.deterministic_id("a", str((folder / "a").resolve()))
    for number, name in enumerate(("extra_key", "cache_salt")):
        engine.do(ask, NAME, prompt, 30_000 + number, 1, **{name: adapter})
    found = engine.do(ask, f"{NAME}:a", prompt, 30_010)
    assert not (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    again = engine.do(ask, f"{NAME}:a", prompt, 30_011)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 90
