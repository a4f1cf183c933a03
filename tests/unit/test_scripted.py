"""The scripted engine: which rule counts, and what its answers look like to OpenAI's client."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from engine_ext.plugin.worker.answers import Answer
from service.errors import StartError
from service.worker.script import Rule, Script, matches, read_script
from service.worker.scripted import ScriptedEngine

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = ScriptedEngine.endpoints


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


async def run(engine: ScriptedEngine, endpoint: str, body: dict[str, Any], rid: str = "id-1") -> Answer:
    return await engine.run(endpoint, body, rid, "kind")


async def said(engine: ScriptedEngine, content: Any, **more: Any) -> tuple[int, str, str]:
    answer = await run(engine, CHAT, chat(content, **more))
    if answer.status_code != 200:
        return answer.status_code, "", ""
    choice = ChatCompletion.model_validate_json(answer.body).choices[0]
    return answer.status_code, choice.message.content or "", choice.finish_reason


async def test_the_first_rule_that_fits_counts() -> None:
    rules = (
        Rule(prompt="flaky*", status=503, times=2),
        Rule(prompt="bad*", status=400),
        Rule(prompt="label *", answer="{model} says {prompt}", finish_reason="content_filter"),
    )
    engine = ScriptedEngine(Script(rules))
    assert [(await said(engine, "flaky 1"))[0] for _ in range(3)] == [503, 503, 200]
    assert (await said(engine, "flaky 2"))[0] == 503, "each prompt has attempts of its own"
    assert await said(engine, "bad one") == (400, "", "")
    assert await said(engine, "label {model}") == (200, "m says label {model}", "content_filter")
    assert await said(engine, [{"type": "text", "text": "echoed"}]) == (200, "echoed", "stop")
    assert await said(engine, "one two three", max_tokens=2) == (200, "one two", "length")
    assert await said(engine, "one STOP two", stop=["STOP"]) == (200, "one ", "stop")
    assert await said(engine, None) == (200, "", "stop")


async def test_answers_are_those_that_the_client_knows() -> None:
    engine = ScriptedEngine()
    texts = await run(engine, COMPLETIONS, {"model": "m", "prompt": ["a b", "c"], "n": 2})
    found = Completion.model_validate_json(texts.body)
    assert [choice.text for choice in found.choices] == ["a b", "a b", "c", "c"]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 6)
    answer = await run(engine, RESPONSES, {"model": "m", "input": "a b c", "max_output_tokens": 2})
    response = Response.model_validate_json(answer.body)
    assert (response.output_text, response.status) == ("a b", "incomplete")
    filtered = ScriptedEngine(Script((Rule(finish_reason="content_filter"),)))
    details = json.loads((await run(filtered, RESPONSES, {"input": "a"})).body)["incomplete_details"]
    assert details == {"reason": "content_filter"}
    floats = await run(engine, EMBEDDINGS, {"model": "m", "input": ["a", "b"], "dimensions": 3})
    rows = CreateEmbeddingResponse.model_validate_json(floats.body).data
    assert [len(row.embedding) for row in rows] == [3, 3]
    assert rows[0].embedding != rows[1].embedding
    packed = json.loads(
        (await run(engine, EMBEDDINGS, {"input": "a", "dimensions": 3, "encoding_format": "base64"})).body
    )
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype=np.float32)
    np.testing.assert_allclose(vector, rows[0].embedding, rtol=1e-6)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/score", {"query": "x", "items": []}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": ["x"]}),
        (COMPLETIONS, {"prompt": []}),
        (EMBEDDINGS, {"input": None, "dimensions": "many"}),
        (COMPLETIONS, {"prompt": "x", "n": "two"}),
    ],
)
async def test_what_cannot_be_read_is_refused(endpoint: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    assert (await run(engine, endpoint, body)).status_code == 400
    served = await engine.serve(endpoint, body, "id-1", "default")
    assert isinstance(served, Answer)
    assert served.status_code == 400


async def events_of(engine: ScriptedEngine, endpoint: str, body: dict[str, Any]) -> list[str]:
    stream: Any = await engine.serve(endpoint, {**body, "stream": True}, "id-1", "flex")
    text = b"".join([event async for event in stream]).decode()
    return text.removesuffix("\n\n").split("\n\n")


class Paused(ScriptedEngine):
    """Notes how long it would wait."""

    waited_s = 0.0

    async def pause(self, rule: Rule, seconds: float, aborted: asyncio.Event) -> bool:
        self.waited_s += seconds
        return False


async def test_a_stream_takes_as_long_as_its_rule_says_and_has_all_choices() -> None:
    engine = Paused(Script((Rule(prompt="bad*", status=503, delay_s=3.0), Rule(delay_s=2.0))))
    events = await events_of(engine, COMPLETIONS, {"model": "m", "prompt": ["a b", "c"], "n": 2})
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    texts = [
        "".join(each["choices"][0]["text"] for each in chunks if each["choices"][0]["index"] == k) for k in range(4)
    ]
    assert texts == ["a b", "a b", "c", "c"]
    assert engine.waited_s == pytest.approx(2.0)
    refused = await engine.serve(COMPLETIONS, {"prompt": "bad one", "stream": True}, "id-2", "flex")
    assert isinstance(refused, Answer)
    assert (refused.status_code, engine.waited_s) == (503, pytest.approx(5.0))


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("*", "", True),
        ("a*", "a\nb", True),
        ("[INST] hi*", "[INST] hi x", True),
        ("what?", "whatX", False),
        ("a*b*c", "abbc", True),
        ("a*b*c", "acb", False),
        ("ab*ba", "aba", False),
        ("**x**", "yxz", True),
    ],
)
def test_a_star_stands_for_any_text_and_nothing_else_is_special(pattern: str, text: str, fits: bool) -> None:
    assert matches(pattern, text) == fits


async def test_streams_have_an_event_for_each_word() -> None:
    engine = ScriptedEngine(Script((Rule(delay_s=0.01),)))
    *chunks, done = await events_of(engine, CHAT, chat("a b c", stream_options={"include_usage": True}))
    parsed = [ChatCompletionChunk.model_validate_json(chunk.removeprefix("data: ")) for chunk in chunks]
    assert done == "data: [DONE]"
    assert "".join(each.choices[0].delta.content or "" for each in parsed[:-1]) == "a b c"
    assert (parsed[-2].choices[0].finish_reason, parsed[-1].choices) == ("stop", [])
    assert {each.service_tier for each in parsed} == {"flex"}
    typed = await events_of(engine, RESPONSES, {"model": "m", "input": "a b"})
    bodies = [json.loads(each.partition("data: ")[2]) for each in typed]
    assert "".join(each["delta"] for each in bodies if each["type"].endswith("delta")) == "a b"
    assert Response.model_validate(bodies[-1]["response"]).output_text == "a b"


async def test_the_clients_own_stream_helpers_understand_the_events() -> None:
    """They build the answer up from its events, each of which has its place."""
    engine = ScriptedEngine()
    chunks = [
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
        for event in (await events_of(engine, CHAT, chat("a b c")))[:-1]
    ]
    chat_state = ChatCompletionStreamState()
    for chunk in chunks:
        chat_state.handle_chunk(chunk)
    message = chat_state.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "a b c")
    kinds = [
        json.loads(event.partition("data: ")[2])["type"] for event in await events_of(engine, RESPONSES, {"input": "a"})
    ]
    assert kinds == [
        *("response.created", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]


async def test_online_requests_overtake_those_of_batches() -> None:
    engine = ScriptedEngine(Script((Rule(prompt="first", fault="hang"),), at_once=1))
    first = asyncio.create_task(run(engine, CHAT, chat("first"), "id-0"))
    while not engine.running:
        await asyncio.sleep(0)
    ended: list[str] = []

    async def ask(name: str, slo: str | None) -> None:
        if slo is None:
            await run(engine, CHAT, chat(name), name)
        else:
            await engine.serve(CHAT, chat(name), name, slo)
        ended.append(name)

    asked = [("batch", None), ("flex", "flex"), ("default", "default"), ("priority", "priority")]
    tasks = [asyncio.create_task(ask(*each)) for each in asked]
    await asyncio.sleep(0)
    engine.abort("id-0")
    await asyncio.wait_for(asyncio.gather(first, *tasks), 10)
    assert ended == ["priority", "default", "flex", "batch"]


async def test_requests_wait_for_a_slot_and_end_when_they_are_aborted_or_withdrawn() -> None:
    engine = ScriptedEngine(Script((Rule(fault="hang"),), at_once=2))
    tasks = [asyncio.create_task(run(engine, CHAT, chat("x"), f"id-{number}")) for number in range(4)]
    while engine.running < 2:
        await asyncio.sleep(0)
    await engine.withdraw(["id-0", "id-2", "id-3"], 1)
    await asyncio.wait_for(asyncio.shield(tasks[2]), 10)
    assert [task.done() for task in tasks] == [False, False, True, False]
    for number in (0, 1, 3):
        engine.abort(f"id-{number}")
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert all(answer.aborted for answer in answers)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", r"rules\.json"),
        ('{"rules": [{"statsu": 500}]}', "statsu"),
        ('{"rules": [{"delay_s": -1}]}', "delay_s"),
        ('{"rules": [{"status": 20}]}', "status"),
        ('{"at_once": 0}', "at_once"),
        ('{"rules": [{"status": 302}]}', "302"),
        ('{"rules": [{"fault": "die", "times": 1}]}', "times"),
    ],
)
def test_a_script_that_cannot_be_used_names_its_file_and_field(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "rules.json"
    file.write_text(text)
    with pytest.raises(StartError, match=named):
        read_script(file)
    with pytest.raises(StartError, match=r"missing\.json"):
        read_script(tmp_path / "missing.json")
