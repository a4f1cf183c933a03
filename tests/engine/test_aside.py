"""Long work of one request is done beside the event loop, and says what SGLang says; needs SGLang, no engine."""
# pyright: reportPrivateUsage=false

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai import serving_rerank
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    ChoiceLogprobs,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingResponse,
    UsageInfo,
)
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from engine_ext.plugin.worker.answers import refused
from engine_ext.plugin.worker.aside import LARGE, aside, project
from engine_ext.plugin.worker.endpoints import Endpoints, _environment
from engine_ext.plugin.worker.logprobs import logprobs_of, with_logprobs
from engine_ext.plugin.worker.marked import Told
from engine_ext.plugin.worker.refusals import code_and_param, in_short
from engine_ext.plugin.worker.serving import TokenTexts, beside_the_loop
from engine_ext.plugin.worker.stop_lengths import Sampling
from engine_ext.plugin.worker.text_size import MOST_TOKEN_BYTES, text_size

TEXTS = ["a", '"logprobs":{"content":[]}', " ü", "\ufffd", "\u2028", "\n", "a"]
HELLO = {"role": "user", "content": "Hello"}
TOO_LONG = "context_length_exceeded prompt"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def answer(tops: list[Any]) -> dict[str, Any]:
    tokens = [(-0.5 * at, at, text) for at, text in enumerate(TEXTS)]
    meta = {"output_token_logprobs": tokens, "finish_reason": {"type": "length"}}
    return {"meta_info": {**meta, "output_top_logprobs": tops} if tops else meta, "text": "".join(TEXTS)}


def response(logprobs: list[Any]) -> ChatCompletionResponse:
    message = ChatMessage(role="assistant", content='"logprobs":{"content":[]}')
    choices = [
        ChatCompletionResponseChoice(index=at, message=message, logprobs=each, finish_reason="length")
        for at, each in enumerate(logprobs)
    ]
    return ChatCompletionResponse(id="a", created=1, model="m", choices=choices, usage=UsageInfo())


@pytest.mark.parametrize("tops", [[], [[(-1.5, 3, "x"), (float("-inf"), 4, "y"), (-1e-7, 5, "x")]] * len(TEXTS)])
def test_log_probabilities_are_written_as_sglang_writes_them(tops: list[Any]) -> None:
    answers, serving = [answer(tops), answer(tops)], OpenAIServingChat.__new__(OpenAIServingChat)
    theirs = [serving._process_response_logprobs(each) for each in answers]  # pyright: ignore[reportPrivateUsage]
    wanted = response(theirs).model_dump_json()
    body = response([ChoiceLogprobs(content=[]) for _ in answers]).model_dump_json().encode()
    assert json.loads(with_logprobs(body, [logprobs_of(each) for each in answers])) == json.loads(wanted)


def test_the_text_of_a_token_is_decoded_once() -> None:
    asked: list[list[list[int]]] = []

    def batch_decode(ids: list[list[int]]) -> list[str]:
        asked.append(ids)
        return [f"t{each}" for [each] in ids]

    manager = SimpleNamespace(tokenizer=SimpleNamespace(batch_decode=batch_decode))
    texts = TokenTexts(manager.tokenizer)
    for ids in ([1, 2, 1], [2, 3]):
        wanted = TokenizerManager.detokenize_logprob_tokens(manager, [0.1] * len(ids), ids, True)  # type: ignore[arg-type]
        asked.pop()
        assert texts([0.1] * len(ids), ids, True) == wanted
    assert asked == [[[1], [2]], [[3]]]
    assert texts([0.1], [9], False) == [(0.1, 9, None)]


def test_stop_strings_are_tokenized_once_for_all_answers() -> None:
    asked: list[str] = []

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            asked.append(text)
            return [0] * len(text)

    tokenizer = Tokenizer()
    theirs, ours = SamplingParams(stop=["ab", "c"]), [Sampling(stop=["ab", "c"]) for _ in range(100)]
    theirs.normalize(tokenizer)
    asked.clear()
    for each in ours:
        each.normalize(tokenizer)
    assert asked == ["ab", "c"]
    assert [getattr(theirs, name) for name in theirs.__struct_fields__] == [
        getattr(ours[-1], name) for name in theirs.__struct_fields__
    ]


async def test_long_texts_are_tokenized_in_a_thread() -> None:
    threads: list[int] = []

    async def tokenize(texts: Any, is_cross_encoder: bool = False) -> Any:
        threads.append(threading.get_ident())
        return [len(texts)], is_cross_encoder

    manager = SimpleNamespace(tokenizer=SimpleNamespace(), _tokenize_texts=tokenize, _handle_batch_request=None)
    beside_the_loop(manager)
    assert await manager._tokenize_texts("short") == ([5], False)
    assert await manager._tokenize_texts([["a" * LARGE, "b"]], True) == ([1], True)
    assert await manager._tokenize_texts(["a" * LARGE, "b"]) == ([2], False)
    assert [each == threading.get_ident() for each in threads] == [True, False, False]


@pytest.mark.parametrize("texts", [["a" * LARGE, "b", "b"], [["q", "a" * LARGE], ["q", "b"]]])
async def test_a_long_list_is_tokenized_in_a_thread_before_any_of_it_is_sent(texts: list[Any]) -> None:
    """SGLang comes with one text after the other, and loses an answer that comes before it has sent them all."""
    threads: list[int] = []

    async def tokenize(texts: Any, is_cross_encoder: bool = False) -> Any:
        threads.append(threading.get_ident())
        return texts, is_cross_encoder

    async def handle(obj: Any, request: Any) -> AsyncIterator[Any]:
        turns = asyncio.create_task(asyncio.sleep(0))
        for place in range(obj.batch_size):
            yield await manager._tokenize_texts(obj[place].text, obj.is_cross_encoder_request)
        assert not turns.done(), "another task has had the loop"

    class Batch(list[Any]):
        text, batch_size, is_cross_encoder_request = texts, len(texts), isinstance(texts[0], list)

    batch = Batch(SimpleNamespace(text=each if isinstance(each, str) else [each]) for each in texts)
    names: dict[str, Any] = {"_tokenize_texts": tokenize, "_handle_batch_request": handle}
    names["_raise_if_logical_request_aborted"] = lambda _: None
    manager = SimpleNamespace(tokenizer=SimpleNamespace(), **names)
    beside_the_loop(manager)
    found = [each async for each in manager._handle_batch_request(batch)]
    assert found == [(each.text, batch.is_cross_encoder_request) for each in batch]
    assert threading.get_ident() not in threads
    assert len(threads) == len({str(each) for each in texts})


def test_a_reranker_compiles_its_template_once() -> None:
    template = "{{ messages[0].content }}/{{ messages[1].content }}{{ instruct | default('') }}"
    wanted = [serving_rerank._render_jinja_chat_template(template, query="q", document=d, instruct=None) for d in "ab"]
    assert _environment().from_string(template) is _environment().from_string(template)
    assert wanted == ["q/a", "q/b"]


def test_an_answer_of_more_numbers_than_others_can_wait_for_is_refused() -> None:
    endpoints = object.__new__(Endpoints)
    config = SimpleNamespace(hidden_size=4096)
    endpoints._manager = SimpleNamespace(model_config=config, max_req_input_len=100)  # type: ignore[assignment]
    few, many = (EmbeddingRequest(model="m", input=["a"] * count) for count in (600, 2048))
    assert endpoints._embedding_fault(few) is None
    found = endpoints._embedding_fault(many)
    assert found == ("input", "has 2048 texts of 4096 numbers each; at most 2,500,000 numbers in all")


def test_embeddings_are_written_as_pydantic_would() -> None:
    endpoints = object.__new__(Endpoints)
    endpoints._model_name = "mine"
    data = [EmbeddingObject(embedding=[0.1, -2e-9], index=0), EmbeddingObject(embedding="AAAA", index=1)]
    for rows in ([], data):
        found = EmbeddingResponse(data=rows, model="theirs", usage=UsageInfo(prompt_tokens=3, total_tokens=3))
        written = json.loads(endpoints._write_embeddings(found, Told("rid", "")))
        assert written == json.loads(found.model_dump_json()) | {"model": "mine"}


async def test_the_loop_answers_while_long_work_is_done() -> None:
    done = threading.Event()
    work = asyncio.create_task(aside(lambda: done.wait(60), True))
    await asyncio.sleep(0)
    done.set()  # by the loop, which the work does not hold up
    assert await work


@pytest.mark.parametrize(
    ("endpoint", "body", "size"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "é" * 50}]}, (100 + 15, 115, "messages")),
        (CHAT, {"messages": "", "tools": [{"x": "y" * 90}], "chat_template_kwargs": {"k": "v"}}, (93, 93, "tools")),
        ("/v1/responses", {"input": "a", "instructions": "b" * 9}, (10, 10, "instructions")),
        (COMPLETIONS, {"prompt": ["a" * 10, "b" * 30]}, (40, 30, "prompt")),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, (12, 3 * MOST_TOKEN_BYTES, "prompt")),
        (COMPLETIONS, {"prompt": [[1], [2, 3]]}, (12, 2 * MOST_TOKEN_BYTES, "prompt")),
        ("/v1/rerank", {"query": "q", "documents": ["a" * 3, "b" * 5]}, (10, 6, "documents")),
        ("/v1/score", {"query": "q" * 9, "items": ["a"] * 20}, (200, 10, "query")),
        ("/v1/rerank", {"query": "q", "instruct": "i" * 9, "documents": ["a"] * 20}, (220, 11, "instruct")),
        (CHAT, {"messages": [{"url": "data:" + "a" * 99, "x": "data:" + "b" * 9}]}, (18, 18, "messages")),
    ],
)
def test_all_text_that_becomes_tokens_is_counted(endpoint: str, body: dict[str, Any], size: tuple[Any, ...]) -> None:
    assert text_size(endpoint, body) == size


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (
            "The input (9 tokens) is longer than the model's context length (5 tokens).",
            "context_length_exceeded prompt",
        ),
        (
            "Requested token count exceeds the model's maximum context length of 5 tokens.",
            "context_length_exceeded prompt",
        ),
        ("top_p must be in (0, 1], got 2.", "invalid_request top_p"),
        ("min_p must be in [0, 1], got 2.", "invalid_request None"),  # not in the body
        ("Something else.", "invalid_request None"),
    ],
)
def test_what_sglang_refuses_names_its_field(message: str, found: str) -> None:
    assert "{} {}".format(*code_and_param(message, {"prompt": "a", "top_p": 2})) == found


PLACES = {
    "messages must be a list of messages.": "hello",
    "messages.0 must be an object with a role and a content.": ["hello"],
    "messages.1.role must be one of 'system', 'developer', 'user', 'assistant' or 'tool'.": [HELLO, {"role": "human"}],
    "messages.0.content is missing.": [{"role": "user"}],
    "messages.0.content must be text, or a list of parts.": [{"role": "user", "content": 5}],
    "messages.0.content.1.image_url must be an object with a url.": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "data:x"}]}
    ],
    "messages.0.content.0.type must be one of 'text', 'image_url', 'video_url' or 'audio_url'.": [
        {"role": "user", "content": [{"type": "input_audio"}]}
    ],
}


@pytest.mark.parametrize(("message", "messages"), PLACES.items())
def test_a_wrong_message_is_named_by_its_place(message: str, messages: Any) -> None:
    fields = {"model": "m", "messages": messages}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ChatCompletionRequest.model_validate(fields)
    found = json.loads(refused(caught.value, fields).body)["error"]
    assert found["message"] == message
    assert message.startswith(found["param"])


def test_what_is_wrong_elsewhere_is_named_too_and_a_dump_is_cut() -> None:
    fields: dict[str, Any] = {"model": "m", "messages": [HELLO], "response_format": "json"}
    found = json.loads(refused(AttributeError("'str' object has no attribute 'get'"), fields).body)["error"]
    assert (found["message"], found["param"]) == ("response_format must be an object.", "response_format")
    fields = {"model": "m", "messages": [HELLO], "temperature": "hot"}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(fields)
    found = json.loads(refused(caught.value, fields).body)["error"]
    assert (found["param"], found["message"].split(":")[0]) == ("temperature", "temperature")
    dump = str(caught.value) + "x" * 5000
    assert len(in_short(dump, {"input": "x"})) < 400
    assert in_short(dump, {"input": [{"role": "human"}]}).startswith("input.0.role must be one of")
    assert code_and_param("input.0.role must be one of", {"input": []}) == ("invalid_request", "input.0.role")


async def test_projects_take_turns_in_front_of_the_thread() -> None:
    """Who sends many long texts waits for its own; what nobody waits for any more is not done."""
    done: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        may_end.wait(60)

    async def of(name: str, which: str) -> None:
        project.set(name)
        await aside(lambda: done.append(which), True)

    holds = asyncio.create_task(aside(first, True))
    await asyncio.to_thread(begun.wait, 60)
    names = ["a1", "a2", "a3", "b1", "a4", "b2", "c1"]
    tasks = [asyncio.create_task(of(name[0], name)) for name in names]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(holds, *tasks, return_exceptions=True)
    assert done == ["a1", "b1", "c1", "a3", "b2", "a4"]
