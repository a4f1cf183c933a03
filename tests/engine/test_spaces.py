"""Projects on one engine: none learns from `cached_tokens` what another one asked."""

import json
from array import array
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.marks import PROJECT, Terms
from engine_ext.plugin.scheduler import spaces
from engine_ext.plugin.scheduler.spaces import BLOCK, Explained, into_space
from service.demo.tiny import NAME
from tests.engine.conftest import running_engine

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


def prompt(first: int, count: int = 300) -> list[int]:
    return [5 + (first + 7 * k) % 900 for k in range(count)]


def cached(body: bytes) -> int:
    usage = json.loads(body)["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


async def ask(host: Any, project: str, number: int, ids: list[int], online: bool = True, **more: Any) -> int:
    """Return how many tokens of the prompt were cached, as the answer says."""
    body = {"model": NAME, "prompt": ids, "max_tokens": 1, **more}
    rid = f"cmpl-{number:032x}"
    if online:
        answer = await host.serve(COMPLETIONS, body, rid, project=project)
    else:
        answer = await host.run(COMPLETIONS, body, rid, "kind", Terms(project=project))
    assert answer.status_code == 200, answer.body
    return cached(answer.body)


def test_no_project_finds_what_another_computed(engine: EngineProcess[Any]) -> None:
    async def look(host: Any) -> list[int]:
        ids, found = prompt(1), []
        steps: list[tuple[str, bool, dict[str, Any]]] = [
            ("a", True, {}),
            ("b", True, {}),
            ("b", False, {}),
            ("a", False, {}),
            ("a", True, {"cache_salt": "x"}),
            ("b", True, {"cache_salt": "x"}),
            ("a", True, {"cache_salt": "x"}),
            ("c", False, {"n": 2}),
        ]
        for number, (project, online, more) in enumerate(steps):
            found.append(await ask(host, project, number, ids, online, **more))
        return found

    a, b, b_again, a_again, salted, other, salted_again, c = engine.do(look)
    assert (a, b, salted, other) == (0, 0, 0, 0)
    assert min(b_again, a_again, salted_again) > 290
    assert c <= 299  # its second answer may find its first


def test_a_project_name_is_no_other_projects_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "mine", lambda: SimpleNamespace(shares_cache=False))

    def key(project: str, extra: str | None) -> str | None:
        req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params={PROJECT: project}), extra_key=extra)
        into_space(None, req)
        return req.extra_key

    assert key("", "x") == "x"
    assert len({key("a", None), key("a", "b"), key("ab", None), key("b", "a"), key("a", "/b")}) == 5


def test_explained_is_what_a_project_had_before() -> None:
    explained, ids = Explained(), array("q", range(10 * BLOCK + 5))
    explained.note("a/", ids)
    assert explained.tokens("a/", ids) == 10 * BLOCK
    assert explained.tokens("a/", ids[: 3 * BLOCK + 1]) == 3 * BLOCK
    assert explained.tokens("a/", array("q", [*ids[: 2 * BLOCK], 7, *ids[2 * BLOCK + 1 :]])) == 2 * BLOCK
    assert explained.tokens("b/", ids) == explained.tokens("a/", ids[1:]) == explained.tokens("a/", array("q")) == 0


@pytest.fixture(scope="module")
def shared(demo: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    with running_engine(demo, {}, log, shares_cache=True) as found:
        yield found


@pytest.mark.slow
def test_a_shared_cache_tells_a_project_only_of_its_own(shared: EngineProcess[Any]) -> None:
    async def look(host: Any) -> tuple[list[int], int]:
        ids = prompt(2)
        found = [await ask(host, project, number, ids) for number, project in enumerate("aabb")]
        chat: dict[str, Any] = {
            "model": NAME,
            "messages": [{"role": "user", "content": "word " * 200}],
            "max_tokens": 100,
        }
        first = json.loads((await host.serve(CHAT, chat, f"chatcmpl-{9:032x}", project="a")).body)
        answer = first["choices"][0]["message"]
        turns = [*chat["messages"], answer, {"role": "user", "content": "more"}]
        second = await host.serve(CHAT, {**chat, "messages": turns}, f"chatcmpl-{10:032x}", project="a")
        return found, cached(second.body) - first["usage"]["prompt_tokens"]

    (a, a_again, b, b_again), of_answer = shared.do(look)
    assert (a, b) == (0, 0)
    assert 299 > min(a_again, b_again) >= 299 - BLOCK
    assert of_answer > -2 * BLOCK
