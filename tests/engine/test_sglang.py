"""Real SGLang on this machine's CPU, through its own serving classes and our plugin."""

import asyncio
import json
import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.engine_process import EngineProcess
from engine_ext.errors import EngineStartError
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import Outputs, Shape, plan_window
from engine_ext.plugin import hooks
from engine_ext.plugin.marks import DUE, KIND, Terms
from engine_ext.plugin.worker.endpoints import Endpoints
from engine_ext.plugin.worker.host import EngineHost
from service.demo.prompts import CHAT, COMPLETIONS, requests
from service.demo.tiny import NAME
from service.estimates.model_costs import planning_costs
from service.requests.tokens import PromptTokens
from tests.engine.conftest import held_aside

VOCABULARY = 4096
QUESTION: dict[str, Any] = {
    "model": "batchweave-demo",
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 8,
    "temperature": 0,
}


async def ask(host: Any, endpoint: str, body: dict[str, Any], kind: str = "test") -> Any:
    """The answer's JSON body, with its status under `status_code`."""
    answer = await host.run(endpoint, {"model": NAME, **body}, f"test-{random.getrandbits(64):016x}", kind)
    return {"status_code": answer.status_code, "aborted": answer.aborted, **json.loads(answer.body)}


async def serve(host: Any, endpoint: str, body: dict[str, Any], rid: str) -> Any:
    return await host.serve(endpoint, body, rid)


@contextmanager
def alive(engine: EngineProcess[Any]) -> Generator[None]:
    """Raise EngineDied where the block finds that a process of the engine has gone."""

    async def rest(host: Any) -> None:
        await asyncio.sleep(60)  # SGLang ends the engine when one of its processes has died

    try:
        yield
    except psutil.NoSuchProcess:
        engine.do(rest)
        raise


def chat(engine: EngineProcess[Any], **changes: Any) -> Any:
    return engine.do(ask, CHAT, {**QUESTION, **changes})


def state(engine: EngineProcess[Any]) -> Any:
    [found] = engine.do(EngineHost.scheduler_states)
    return found


async def compiles(_host: Any) -> bool:
    """Whether torch would compile in this process, or in one that is forked from it."""
    from torch._dynamo import config

    return not config.disable


def test_torch_compiles_nothing_while_requests_wait(engine: EngineProcess[Any]) -> None:
    """The first request with a repetition penalty held all others up for ten seconds."""
    assert not engine.do(compiles)
    assert chat(engine, repetition_penalty=1.1)["status_code"] == 200


async def until_admitted(host: Any, count: int) -> None:
    async with asyncio.timeout(60):
        while (await host.scheduler_states())[0]["admitted"] < count:
            await asyncio.sleep(0.02)


def test_plugin_is_in_the_scheduler_process(engine: EngineProcess[Any]) -> None:
    assert "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw" in state(engine)["hooks"]


def test_an_idle_engine_leaves_the_processor_to_others(engine: EngineProcess[Any]) -> None:
    state(engine)
    with alive(engine):
        children = psutil.Process(engine.pid).children(recursive=True)
        schedulers = [each for each in children if each.name().startswith("sglang::sched")]
        assert schedulers
        time.sleep(2)  # its first idle round looks through the caches
        before = [sum(each.cpu_times()[:2]) for each in schedulers]
        time.sleep(3)
        assert max(sum(each.cpu_times()[:2]) - at for each, at in zip(schedulers, before, strict=True)) < 1


def test_start_is_refused_when_a_hook_is_missing(engine: EngineProcess[Any]) -> None:
    async def start_again(host: Any) -> None:
        real = hooks.hooks()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "hooks", lambda: [*real, ("sglang.srt.not_hooked", print, None)])
            await host.start()

    with pytest.raises(EngineStartError, match="not_hooked"):
        engine.do(start_again)


def test_both_ends_of_what_waits_are_admitted_at_once(engine: EngineProcess[Any]) -> None:
    """Long answers to short prompts arrive behind all the long prompts with short answers, and run beside them."""
    text = [" ".join(f"word{n} {k}" for k in range(120)) for n in range(60)]

    async def run(host: Any) -> list[str]:
        asked = [{"prompt": text[n], "max_tokens": 2} for n in range(60)]
        asked += [{"prompt": f"Go on {n}", "max_tokens": 200} for n in range(40)]
        before = (await host.scheduler_states())[0]["admitted"]
        tasks = [
            asyncio.create_task(host.run(COMPLETIONS, {**QUESTION, **body, "ignore_eos": True}, f"ends-{n:03}", "test"))
            for n, body in enumerate(asked)
        ]
        answers = await asyncio.gather(*tasks)
        assert all(answer.status_code == 200 for answer in answers)
        [found] = await host.scheduler_states()
        assert found["admitted"] - before == len(asked) + found["retractions"]
        return list(dict.fromkeys(rid for rid in found["recent_ids"] if rid.startswith("ends-")))

    order = [int(rid.removeprefix("ends-")) for rid in engine.do(run)]
    assert sorted(order) == list(range(100))
    half = order.index([n for n in order if n < 60][30])
    assert sum(n >= 60 for n in order[:half]) >= 10


@pytest.mark.parametrize("words", [1, 60])
def test_a_short_window_is_answered_before_a_long_one(engine: EngineProcess[Any], words: int) -> None:
    """Five lines of ten minutes come while hundreds of a day wait: the next plan lets them in."""
    long = "You are a careful clerk. " * 12

    async def run(host: Any) -> tuple[int, list[int]]:
        def body(text: str, tokens: int) -> dict[str, Any]:
            return {**QUESTION, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}

        now = time.monotonic()
        patient = [
            asyncio.create_task(host.run(CHAT, body(f"{long} {n}", 24), f"day-{n:03}", "day", Terms(now + 86_400)))
            for n in range(400)
        ]
        async with asyncio.timeout(120):
            while sum(task.done() for task in patient) < 20:
                await asyncio.sleep(0.02)
        hurried = [
            host.run(CHAT, body("hi " * words, 4), f"soon-{n}", "soon", Terms(time.monotonic() + 600)) for n in range(5)
        ]
        answers = await asyncio.gather(*hurried)
        still = sum(not task.done() for task in patient)
        for n, task in enumerate(patient):
            if not task.done():
                host.abort(f"day-{n:03}")
        await asyncio.gather(*patient)
        return still, [answer.status_code for answer in answers]

    still, statuses = engine.do(run)

    assert statuses == [200] * 5
    assert still > 200


def test_answers_are_the_same_in_any_order(engine: EngineProcess[Any], demo: Path) -> None:
    """Temperature 0, token by token: in the plan's order, in that of submission, and at random, from an empty cache.

    On a CPU this holds because every kernel is batch-invariant as we run it: bfloat16 GEMM on one thread gives a row
    the same bits for any number of rows (measured for 1 to 600; float32 does not below four), and attention sums in
    float64 (engine_ext/plugin/cpu/attention.py). Without the latter 35 of 200 answers differed.
    """
    lines = [line for each in requests("batchweave-demo").values() for line in each]
    tokens = PromptTokens.load(str(demo))
    ids = [tokens.encode(line["url"], [line["body"]])[0].ids for line in lines]
    costs = planning_costs(str(demo), "h200", 1)
    outputs = Outputs.of_known(np.full(len(ids), 64))
    planned = plan_window(Prompts.of(ids), outputs, costs, shape=Shape(slice_requests=64)).order.tolist()
    shuffled = random.Random(5).sample(range(len(lines)), len(lines))

    async def run(host: Any, order: list[int]) -> tuple[list[Any], int]:
        await host._manager.flush_cache()
        bodies = [{**line["body"], "return_token_ids": True} for line in lines]
        found = await asyncio.gather(*(ask(host, lines[n]["url"], bodies[n]) for n in order))
        answers = [each for _, each in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]
        cached = sum((each["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for each in answers)
        return [each["choices"][0]["token_ids"] for each in answers], cached

    in_plan, cached = engine.do(run, planned)
    submitted, _ = engine.do(run, list(range(len(lines))))
    at_random, _ = engine.do(run, shuffled)
    assert cached > 0
    assert all(in_plan)
    assert in_plan == submitted
    assert in_plan == at_random


def test_planner_counts_the_tokens_that_sglang_counts(engine: EngineProcess[Any], demo: Path) -> None:
    tokens = PromptTokens.load(str(demo))
    for endpoint in (CHAT, COMPLETIONS):
        bodies = [{**line["body"], "max_tokens": 1} for line in requests("batchweave-demo")[endpoint][::9]]
        mine = [len(each.ids) for each in tokens.encode(endpoint, bodies)]

        async def run(host: Any, endpoint: str = endpoint, bodies: Any = bodies) -> list[Any]:
            return await asyncio.gather(*(ask(host, endpoint, body) for body in bodies))

        assert mine == [each["usage"]["prompt_tokens"] for each in engine.do(run)]


def test_shared_prefix_is_read_from_the_cache(engine: EngineProcess[Any]) -> None:
    chat(engine)
    again = chat(engine)
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1


def test_response_format_holds_on_a_cpu(engine: EngineProcess[Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
        "required": ["ok", "colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = chat(engine, response_format=form, max_tokens=300)
    assert found["choices"][0]["finish_reason"] == "stop"
    answer = json.loads(found["choices"][0]["message"]["content"])
    assert set(answer) == {"ok", "colour"}
    assert answer["colour"] in ("red", "blue")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "allows no further token"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "allows no further"),
        ({"type": "string", "pattern": "^((.|..|...)?(.|..)?)*$"}, "too ambiguous"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_grammar_that_nothing_satisfies_or_takes_long_ends_its_own_request(
    engine: EngineProcess[Any], schema: dict[str, Any], why: str, temperature: float
) -> None:
    """Without a token that may come the sampler failed on all requests of the step, and the engine died."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {**QUESTION, "temperature": temperature, "max_tokens": 200}

    async def beside(host: Any) -> Any:
        wanted = [ask(host, CHAT, {**body, "response_format": form}, "odd"), ask(host, CHAT, body, "good")]
        return await asyncio.gather(*wanted)

    odd, good = engine.do(beside)
    assert odd["status_code"] == 400, odd
    assert why in odd["error"]["message"]
    assert good["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_grammar_and_a_least_length_that_contradict_each_other_end_their_own_request(
    engine: EngineProcess[Any],
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    body = {**QUESTION, "max_tokens": 16, "temperature": 1}

    async def beside(host: Any) -> Any:
        odd = ask(host, CHAT, {**body, "min_tokens": 16, "response_format": form}, "odd")
        return await asyncio.gather(odd, ask(host, CHAT, body, "good"))

    odd, good = engine.do(beside)
    assert (odd["status_code"], good["status_code"]) == (400, 200), odd
    assert "min_tokens" in odd["error"]["message"]


def test_scores_and_chats_share_a_step(engine: EngineProcess[Any]) -> None:
    """One of each in a prefill killed the scheduler."""
    score = {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}

    async def beside(host: Any) -> Any:
        scores = [ask(host, "/v1/score", score) for _ in range(4)]
        return await asyncio.gather(*scores, *(ask(host, CHAT, {**QUESTION, "max_tokens": 16}) for _ in range(4)))

    assert [each["status_code"] for each in engine.do(beside)] == [200] * 8


def test_sampling_fields_mean_what_they_mean_in_sglang(engine: EngineProcess[Any]) -> None:
    two = chat(engine, n=2, temperature=1.0, seed=7)
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    probed = chat(engine, logprobs=True, top_logprobs=2)
    assert len(probed["choices"][0]["logprobs"]["content"]) == probed["usage"]["completion_tokens"]
    assert len(probed["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    plain = chat(engine, max_tokens=30)["choices"][0]["message"]["content"]
    stop = plain[len(plain) // 2 :][:6]
    stopped = chat(engine, max_tokens=30, stop=[stop])["choices"][0]
    assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", plain[: plain.index(stop)])
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    assert chat(engine, tools=[tool])["status_code"] == 200


@pytest.mark.parametrize(
    ("endpoint", "changes"),
    [
        (CHAT, {"temperature": -1}),
        (CHAT, {"temperature": "hot"}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 20_000}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "text"}),
        (CHAT, {"max_tokens": 10**9}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        (CHAT, {"tool_choice": "required"}),
        (CHAT, {"top_k": 10**12}),
        (CHAT, {"top_k": -(10**12)}),
        (CHAT, {"min_tokens": 1, "stop_token_ids": [10**6]}),
        (CHAT, {"stop_regex": "(("}),
        (CHAT, {"logit_bias": {"5": -1e308}}),
        (CHAT, {"logit_bias": {"5": 101}}),
        (CHAT, {"temperature": 1e300}),
        (CHAT, {"temperature": 1e-6}),
        (CHAT, {"repetition_penalty": 1e-45}),
        (CHAT, {"response_format": "json"}),
        (CHAT, {"response_format": ["json"]}),
        (CHAT, {"extra_key": ["x"]}),
        (CHAT, {"chat_template_kwargs": {"messages": []}}),
        (CHAT, {"messages": [{"role": "user", "content": None}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}),
        (COMPLETIONS, {"prompt": [1000000.0]}),
        (COMPLETIONS, {"logprobs": "1000000"}),
        (COMPLETIONS, {"prompt": ["a", "b c"], "echo": True, "logprobs": 0}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [1, 10**6]}),
        (COMPLETIONS, {"prompt": [[1], [-5]]}),
        (COMPLETIONS, {"logprobs": 10**6}),
        (CHAT, {"logprobs": True, "top_logprobs": 10**6}),
        (CHAT, {"input_ids": [10**6]}),
        (CHAT, {"logit_bias": {"99999999": 1}}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
    ],
)
def test_bad_request_is_4xx_in_the_envelope_and_harms_nobody(
    engine: EngineProcess[Any], endpoint: str, changes: dict[str, Any]
) -> None:
    found = engine.do(ask, endpoint, {**QUESTION, **changes})
    assert 400 <= found["status_code"] < 500, found
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert chat(engine)["status_code"] == 200


def test_fields_of_the_service_are_not_a_clients_to_set(engine: EngineProcess[Any]) -> None:
    found = chat(
        engine,
        rid="mine",
        priority=9,
        stream=True,
        custom_params={"batchweave_kind": [5], "batchweave_untold": 1, "batchweave_lengths": "x"},
    )
    assert found["status_code"] == 200
    assert found["id"].startswith("test-")
    assert state(engine)["recent_ids"][-1] == found["id"]


@pytest.mark.parametrize("lengths", ["[[0,300,900]]", "a format of another version"])
def test_profiles_of_lengths_change_no_answer(engine: EngineProcess[Any], lengths: str) -> None:
    answers = [
        engine.do(EngineHost.run, CHAT, QUESTION, f"test-lengths-{number}", "test", Terms(lengths=given)).body
        for number, given in enumerate(("", lengths))
    ]
    first, second = (json.loads(answer)["choices"] for answer in answers)
    assert first == second


def test_abort_ends_every_prompt_of_a_list(engine: EngineProcess[Any]) -> None:
    before = state(engine)["admitted"]

    async def run(host: Any) -> Any:
        body = {**QUESTION, "prompt": ["one", "two", "three"], "max_tokens": 4000, "ignore_eos": True}
        task = asyncio.create_task(host.run(COMPLETIONS, body, "list-1.", "test"))
        await until_admitted(host, before + 3)
        host.abort("list-1.")
        async with asyncio.timeout(20):
            return await task

    assert engine.do(run).aborted


def test_abort_ends_a_running_and_a_waiting_request(engine: EngineProcess[Any]) -> None:
    before = state(engine)["admitted"]

    async def run(host: Any) -> list[Any]:
        body = {**QUESTION, "max_tokens": 4000, "ignore_eos": True}
        tasks = [asyncio.create_task(host.run(CHAT, body, f"abort-{n:03}.", "test")) for n in range(40)]
        await until_admitted(host, before + 10)  # the KV pool holds about sixteen such requests
        for n in range(40):
            host.abort(f"abort-{n:03}.")
        async with asyncio.timeout(30):
            return await asyncio.gather(*tasks)

    assert all(answer.aborted for answer in engine.do(run))
    assert chat(engine)["status_code"] == 200
    assert state(engine)["waiting"] == 0


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
        (COMPLETIONS, {"prompt": ["word " * 500 for _ in range(60)], "max_tokens": 1}),
        ("/v1/responses", {"input": "word " * 40_000}),
        ("/v1/score", {"query": "is", "items": ["word " * 500 for _ in range(60)], "label_token_ids": [5, 6]}),
    ],
)
def test_abort_ends_a_request_whose_text_is_being_converted(
    engine: EngineProcess[Any], endpoint: str, body: dict[str, Any]
) -> None:
    async def run(host: Any) -> Any:
        with held_aside():
            task = asyncio.create_task(host.run(endpoint, {"model": NAME, **body}, "long-1.", "test"))
            await asyncio.sleep(0.1)
            assert not task.done()
            host.abort("long-1.")
        async with asyncio.timeout(60):
            return await task

    before = state(engine)["admitted"]
    assert engine.do(run).aborted
    assert state(engine)["admitted"] == before


def test_responses(engine: EngineProcess[Any]) -> None:
    async def run(host: Any) -> None:
        found = await ask(
            host,
            "/v1/responses",
            {"input": "Name a colour.", "instructions": "Be brief.", "max_output_tokens": 5, "temperature": 0},
        )
        assert (found["status_code"], found["object"]) == (200, "response")
        assert found["output"][0]["content"][0]["type"] == "output_text"
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        usage = found["usage"]
        assert usage["output_tokens"] == 5
        assert usage["total_tokens"] == usage["input_tokens"] + 5
        messages = [{"role": "user", "content": [{"type": "input_text", "text": "Name a colour."}]}]
        assert (await ask(host, "/v1/responses", {"model": NAME, "input": messages, "max_output_tokens": 1}))[
            "status_code"
        ] == 200
        for refused in (
            {"input": []},
            {"input": "x", "background": True},
            {"input": "x", "previous_response_id": "resp_1"},
            {"input": "x", "temperature": -1},
            {"input": "x", "max_output_tokens": 2**40},
            {"input": "word " * 40_000},
            {"input": [{}]},
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/x"}]}]},
        ):
            found = await ask(host, "/v1/responses", refused)
            assert (found["status_code"], bool(found["error"]["message"])) == (400, True), refused

    engine.do(run)


def test_score(engine: EngineProcess[Any]) -> None:
    body = {"query": "Is it blue?", "items": ["The sea", "The grass", "Fire"], "label_token_ids": [5, 6]}

    async def run(host: Any) -> None:
        found = await ask(host, "/v1/score", {**body, "apply_softmax": True})
        assert (found["status_code"], len(found["scores"]), found["model"]) == (200, 3, NAME)
        assert all(sum(each) == pytest.approx(1) for each in found["scores"])
        assert found["usage"]["prompt_tokens"] > 9
        for changes in (
            {"label_token_ids": []},
            {"label_token_ids": [VOCABULARY]},
            {"query": [], "items": [[]]},
            {"query": [5], "items": [[VOCABULARY]]},
            {"item_embed_overrides": [[[0.0] * 3]]},
        ):
            refused = await ask(host, "/v1/score", {**body, **changes})
            assert refused["status_code"] == 400, changes

    engine.do(run)


def test_rerank_with_a_models_own_template(engine: EngineProcess[Any]) -> None:
    """The template is what says that a model reranks; the demo's does not, so a reranker's stands in."""
    template = (
        'The answer can only be "yes" or "no". {{ messages[0]["content"] }} | {{ messages[1]["content"] }} Answer:'
    )

    async def run(host: Any) -> None:
        assert "/v1/rerank" not in host.endpoints
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host._manager.tokenizer, "chat_template", template)
            served = Endpoints(host._manager, host._engine.template_manager, NAME).served
            patch.setitem(host._others.served, "/v1/rerank", served["/v1/rerank"])
            await rerank(host)

    async def rerank(host: Any) -> None:
        body = {"query": "blue", "documents": ["The sea", "The grass", "Fire"], "top_n": 2}
        found = await ask(host, "/v1/rerank", body)
        assert (found["status_code"], found["object"], found["model"]) == (200, "rerank", NAME)
        assert len(found["results"]) == 2
        assert found["results"][0]["score"] >= found["results"][1]["score"]
        assert set(found["results"][0]) == {"score", "document", "index"}
        assert found["usage"]["prompt_tokens"] > 30
        for changes in ({"documents": []}, {"query": ""}, {"documents": [[{"type": "text", "text": "x"}]]}):
            assert (await ask(host, "/v1/rerank", {**body, **changes}))["status_code"] == 400, changes

    engine.do(run)


async def stream(host: Any, endpoint: str, body: dict[str, Any], rid: str) -> list[dict[str, Any]]:
    """The events of an online request."""
    found = await host.serve(endpoint, {**QUESTION, "stream": True, **body}, rid)
    text = b"".join([event async for event in found]).decode()
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(each.removeprefix("data: ")) for each in events]


def test_an_online_request_has_the_answer_of_a_batch_streamed_or_whole(engine: EngineProcess[Any]) -> None:
    wanted = chat(engine)["choices"][0]["message"]["content"]
    whole = engine.do(serve, CHAT, QUESTION, "online-whole")
    assert json.loads(whole.body)["choices"][0]["message"]["content"] == wanted
    body = {"stream_options": {"include_usage": True}}
    *events, usage = engine.do(stream, CHAT, body, "chatcmpl-online")
    assert "".join(each["choices"][0]["delta"]["content"] or "" for each in events[:-1]) == wanted
    assert {each["id"] for each in events} == {"chatcmpl-online"}
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)
    texts = engine.do(stream, COMPLETIONS, {"prompt": ["one", "two"], "n": 2}, "cmpl-online")
    assert {each["choices"][0]["index"] for each in texts} == {0, 1, 2, 3}


def test_responses_are_answered_online(engine: EngineProcess[Any]) -> None:
    body = {"model": NAME, "input": "Name a colour.", "max_output_tokens": 4, "temperature": 0}
    before = state(engine)["admitted"]
    found = engine.do(serve, "/v1/responses", body, "resp_online")
    assert (found.status_code, json.loads(found.body)["usage"]["output_tokens"]) == (200, 4)
    events = engine.do(response_events, body, "resp_stream")
    assert state(engine)["admitted"] == before, "the scan admits requests of batches"
    whole = json.loads(found.body)["output"][0]["content"][0]["text"]
    assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == whole
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    first, last = events[0]["response"], events[-1]["response"]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.incomplete")
    assert (first["id"], first["service_tier"], first["model"]) == ("resp_stream", "default", NAME)
    assert (last["id"], last["usage"], last["status"]) == ("resp_stream", json.loads(found.body)["usage"], "incomplete")
    ended = engine.do(response_events, {**body, "max_output_tokens": 400}, "resp_long")[-1]
    assert ended["type"] == (
        "response.completed" if ended["response"]["status"] == "completed" else "response.incomplete"
    )


async def response_events(host: Any, body: dict[str, Any], rid: str) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    found = await host.serve("/v1/responses", {**body, "stream": True}, rid)
    text = b"".join([event async for event in found]).decode()
    return [json.loads(each.partition("\ndata: ")[2]) for each in text.removesuffix("\n\n").split("\n\n")]


def test_an_online_request_passes_for_no_batch(engine: EngineProcess[Any]) -> None:
    before = state(engine)
    params = {KIND: "a batch", DUE: 1e9, "their own": 1}
    engine.do(stream, CHAT, {"custom_params": params, "priority": -5}, "online-marked")
    after = state(engine)
    assert after["admitted"] == before["admitted"], "the scan admits requests of batches"


@pytest.mark.parametrize(
    "bad", [{"temperature": "hot"}, {"temperature": 1e-9}, {"messages": 7}, {"max_tokens": 10**6}, {"n": 2**40}]
)
def test_a_bad_online_request_is_refused_before_its_stream(engine: EngineProcess[Any], bad: dict[str, Any]) -> None:
    answer = engine.do(serve, CHAT, {**QUESTION, "stream": True, **bad}, "online-bad")
    assert answer.status_code == 400
    assert json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize(
    "bad", [{"temperature": "hot"}, {"input": [{}]}, {"max_output_tokens": 2**40}, {"input": "word " * 40_000}]
)
def test_a_bad_response_is_refused_before_its_stream(engine: EngineProcess[Any], bad: dict[str, Any]) -> None:
    answer = engine.do(serve, "/v1/responses", {"model": NAME, "input": "x", "stream": True, **bad}, "r-bad")
    assert answer.status_code == 400
    assert json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize(
    "more", [{}, {"n": 3}, {"prompt": ["one", "two"]}, {"input": "one", "max_output_tokens": 4000}]
)
def test_an_online_request_that_nobody_reads_ends(engine: EngineProcess[Any], more: dict[str, Any]) -> None:
    endpoint = COMPLETIONS if "prompt" in more else "/v1/responses" if "input" in more else CHAT

    async def run(host: Any) -> None:
        body = {**QUESTION, "max_tokens": 4000, "ignore_eos": True, **more}
        found = await host.serve(endpoint, {**body, "stream": True}, "online-left")
        events = aiter(found)
        assert b"data: " in await anext(events)
        await found.close()
        await until_idle(host)
        whole = asyncio.create_task(host.serve(endpoint, body, "online-cancelled"))
        steps = await steps_so_far(host)
        while await steps_so_far(host) < steps + 5:
            await asyncio.sleep(0.02)
        whole.cancel()
        await until_idle(host)
        with pytest.raises(asyncio.CancelledError):  # an answer would be taken for the engine's
            await whole
        assert host.step_age_s == 0.0, "nothing counts as in flight"

    async def steps_so_far(host: Any) -> int:
        return (await host.scheduler_states())[0]["engine_steps"]

    async def until_idle(host: Any) -> None:
        async with asyncio.timeout(60):
            steps = -1
            while steps != (steps := await steps_so_far(host)):
                await asyncio.sleep(0.5)

    before = state(engine)["output_tokens"]
    engine.do(run)
    assert state(engine)["output_tokens"] - before < 4000, "each of both would have got as many"


def test_a_stream_that_is_read_slowly_is_no_hang(engine: EngineProcess[Any]) -> None:
    """Once the engine has answered, the client's time does not count: it was killed after a minute of it."""

    async def run(host: Any) -> None:
        found = await host.serve(CHAT, {**QUESTION, "max_tokens": 4, "stream": True}, "online-slow")
        events = aiter(found)
        await anext(events)
        async with asyncio.timeout(30):
            while host.step_age_s > 0:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert host.step_age_s == 0.0
        assert [event async for event in events][-1] == b"data: [DONE]\n\n"
        await found.close()

    engine.do(run)


def test_an_engine_of_one_machine_listens_on_loopback_alone(engine: EngineProcess[Any]) -> None:
    with alive(engine):
        family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
        listening = [each for one in family for each in one.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert listening
    assert {each.laddr.ip for each in listening} <= {"127.0.0.1", "::1"}
