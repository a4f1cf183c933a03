"""The tiny model is the same every time, and its requests and the demo's are what they claim to be."""

import hashlib
import json
from pathlib import Path

from service.demo.prompts import CHAT, COMPLETIONS, corpus, requests
from service.demo.tasks import tasks
from service.demo.tiny import ensure_tiny_model
from service.requests.lines import LineChecker
from service.requests.tokens import Prompt, PromptTokens


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_tiny_model_is_made_the_same_twice(tmp_path: Path) -> None:
    first = ensure_tiny_model(tmp_path / "a", corpus())
    second = ensure_tiny_model(tmp_path / "b", corpus())
    assert digests(first) == digests(second)
    before = (first / "config.json").stat().st_mtime_ns
    assert ensure_tiny_model(first, corpus()) == first
    assert (first / "config.json").stat().st_mtime_ns == before
    older = json.loads((first / "config.json").read_text()) | {"batchweave_demo": 1}
    (first / "config.json").write_text(json.dumps(older))
    assert digests(ensure_tiny_model(first, corpus())) == digests(second)  # made again


def test_the_tiny_models_requests_have_three_kinds_that_pass_validation() -> None:
    found = requests("m")
    assert sum(len(lines) for lines in found.values()) >= 200
    assert {line["custom_id"].split("-")[0] for lines in found.values() for line in lines} == {
        "ticket",
        "document",
        "story",
    }
    for endpoint in (CHAT, COMPLETIONS):
        checker = LineChecker(endpoint)
        for number, line in enumerate(found[endpoint], 1):
            checker.check(number, json.dumps(line).encode())
        assert (checker.requests, checker.errors) == (len(found[endpoint]), [])


def test_the_demos_requests_pass_validation() -> None:
    checker, kinds = LineChecker(CHAT), set[str]()
    for number, line in enumerate(tasks("m"), 1):
        checker.check(number, json.dumps(line).encode())
        kinds.add(line["custom_id"].partition("-")[0])
    assert (checker.requests, checker.errors) == (86, [])
    assert kinds == {"question", "summary", "extract", "label"}


def test_prompts_of_a_kind_share_their_prefix(tmp_path: Path) -> None:
    tokens = PromptTokens.load(str(ensure_tiny_model(tmp_path / "m", corpus())))
    first, second = tokens.encode(CHAT, [line["body"] for line in requests("m")[CHAT][:2]])
    shared = next(i for i, (a, b) in enumerate(zip(first.ids, second.ids, strict=False)) if a != b)
    assert shared > 0.9 * min(len(first.ids), len(second.ids))
    assert first.is_exact


def test_prompt_that_the_template_refuses_is_planned_by_its_text(tmp_path: Path) -> None:
    tokens = PromptTokens.load(str(ensure_tiny_model(tmp_path / "m", corpus())))
    odd = [{"messages": [{"content": None}]}, {"messages": 5}, {"messages": [{"role": "user", "content": [1, "x"]}]}]
    assert all(prompt.ids and not prompt.is_exact for prompt in tokens.encode(CHAT, odd))


def test_prompts_given_as_token_ids_are_kept(tmp_path: Path) -> None:
    tokens = PromptTokens.load(str(ensure_tiny_model(tmp_path / "m", corpus())))
    assert tokens.encode(COMPLETIONS, [{"prompt": [7, 8, 9]}]) == [Prompt([7, 8, 9], True)]


def test_other_endpoints_have_prompts_to_plan_by(tmp_path: Path) -> None:
    tokens = PromptTokens.load(str(ensure_tiny_model(tmp_path / "m", corpus())))
    question = {"role": "user", "content": "Name a colour."}
    [chat] = tokens.encode(CHAT, [{"messages": [{"role": "system", "content": "Be brief."}, question]}])
    asked = [{"instructions": "Be brief.", "input": given} for given in ("Name a colour.", [question])]
    assert [each.ids for each in tokens.encode("/v1/responses", asked)] == [chat.ids, chat.ids]
    [text, ids, several] = tokens.encode("/v1/embeddings", [{"input": "sea"}, {"input": [5, 6]}, {"input": ["a", "b"]}])
    assert (text.is_exact, ids, several.is_exact) == (True, Prompt([5, 6], True), False)
    for endpoint, name in (("/v1/score", "items"), ("/v1/rerank", "documents")):
        [short, long] = tokens.encode(endpoint, [{"query": "q", name: ["sea"] * count} for count in (1, 50)])
        assert len(long.ids) > len(short.ids) + 49
    for endpoint in ("/v1/responses", "/v1/score", "/v1/embeddings"):
        assert tokens.encode(endpoint, [{"input": {"odd": 1}, "items": 5}])
