"""Drives one SGLang engine in this process, through SGLang's own OpenAI serving classes."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

from engine_ext import warm_up
from engine_ext.coserve.slo import DEFAULT
from engine_ext.costs.cost import CostModel
from engine_ext.errors import EngineEnded, EngineStartError
from engine_ext.plugin import hooks, json_log, sglang_fields
from engine_ext.plugin.marks import KIND, NO_TERMS, UNTOLD, Terms, marks, online_marks
from engine_ext.plugin.options import Options, Overlap, Scheduling, emulated_name
from engine_ext.plugin.platform_entry import accelerator_memory, gpu_is_present, machine_name
from engine_ext.plugin.pulse import Pulses, Watch
from engine_ext.plugin.worker import guard, kernels, overlap, parsers, patience, tool_schemas
from engine_ext.plugin.worker.answers import (
    ABORTED,
    Answer,
    Stream,
    added_fields,
    error_body,
    event_with_fields,
    failed,
    refused,
    with_fields,
)
from engine_ext.plugin.worker.aside import is_online
from engine_ext.plugin.worker.bodies import plain, unserved
from engine_ext.plugin.worker.calibration_load import measure_steps, time_blend
from engine_ext.plugin.worker.cpu_defaults import arguments_for, prepare
from engine_ext.plugin.worker.endpoints import Endpoints
from engine_ext.plugin.worker.forking import ForkingEngine
from engine_ext.plugin.worker.in_flight import InFlight
from engine_ext.plugin.worker.marked import ONLINE, Told
from engine_ext.plugin.worker.other_calls import OtherCalls
from engine_ext.plugin.worker.serving import Chat, Completion, Serving, Written, beside_the_loop
from engine_ext.plugin.worker.shedding import Shedding
from engine_ext.plugin.worker.shutdown import shut_down
from engine_ext.plugin.worker.text_size import MOST_TOKEN_BYTES, TextSize, text_size

STEP_LIMIT_S = 60.0
# Fields that a request must not set: identity, place in the queue, and routing belong to the service. `custom_params`
# is for code that the service refuses; SGLang would send each answer's copy of it to the scheduler.
RESERVED_FIELDS = frozenset(
    {"rid", "request_id", "priority", "stream", "stream_options", "session_id", "session_params", "bootstrap_host"}
    | {"custom_params", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "data_parallel_rank"}
    | {"disagg_prefill_dp_rank"}
)
STREAM_FIELDS = frozenset({"stream", "stream_options"})  # of these, online requests may set

# For how many turns of its loop, 5 ms each when idle, the scheduler waits for a grammar; SGLang's default is 10,000.
GRAMMAR_TURNS = "6000"

# What SGLang does for a minute, inside its event loop, before it says that one of its processes has died.
DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


class EngineHost:
    """A worker's engine. Create it in the main thread before the event loop runs, then `await start()` in the loop.

    On a follower, the constructor blocks until the engine ends, and then raises EngineEnded.

    `wanted`: see `overlap.choose`. `step_limit_s`: if requests are in flight and no step ends for this long, the engine
    counts as hung, and is killed together with this process.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str,
        engine_args: dict[str, Any],
        options: Options,
        wanted: Overlap | None = None,
        step_limit_s: float = STEP_LIMIT_S,
    ) -> None:
        on_gpu = gpu_is_present()
        if options.scheduling is Scheduling.DUAL_SCAN:
            sglang_fields.check()
        if not on_gpu:
            options, engine_args = prepare(options, engine_args)
        chosen = overlap.choose(wanted, model_path, engine_args)
        self._pulses = Pulses()
        replace(options, overlap=chosen, pulses=str(self._pulses.path)).hand_over()
        os.environ.setdefault("SGLANG_GRAMMAR_MAX_POLL_ITERATIONS", GRAMMAR_TURNS)
        for name in DUMPS:
            os.environ.setdefault(name, "false")
        if int(engine_args.get("nnodes", 1)) == 1:  # else they talk to other machines
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        json_log.configure()
        self._emulated = emulated_name(options.cost.machine) if options.emulated else None
        self.device = self._emulated or ("gpu" if on_gpu else "cpu")
        compiling = warm_up.begin()  # while the engine starts, because it takes as long the first time
        arguments: dict[str, Any] = {
            "model_path": model_path,
            "served_model_name": model_name,
            "schedule_policy": "fcfs",
            "enable_cache_report": True,
            "skip_server_warmup": True,
            "sleep_on_idle": True,  # otherwise it keeps a core busy even when it is idle
            "log_level": "warning",
            **({} if on_gpu else arguments_for(options, engine_args)),
            **overlap.ARGUMENTS[chosen],
            **engine_args,
        }
        arguments["tool_call_parser"], arguments["reasoning_parser"] = parsers.chosen(model_path, arguments)
        patience.bound()
        tool_schemas.install()
        try:
            self._engine = Engine(**arguments) if on_gpu else ForkingEngine(**arguments)
        except (ValueError, RuntimeError) as error:  # what SGLang says of a model or an argument
            raise EngineStartError(str(error)) from error
        if engine_args.get("node_rank"):  # SGLang waits in Engine() on every node but the first
            raise EngineEnded
        if compiling is not None:
            compiling.wait()
        self._manager: Any = self._engine.tokenizer_manager
        self._in_flight = InFlight(self._manager)
        self._watch = Watch(self._pulses, step_limit_s, self._in_flight.works_since)
        self._vocab_size = int(self._manager.model_config.vocab_size)
        manager, templates = self._manager, self._engine.template_manager
        beside_the_loop(manager)
        self._shedding = None
        if options.sheds:
            self._shedding = Shedding(self._pulses, options.online, self.context_length)
        self._serving: dict[str, tuple[type[BaseModel], Serving]] = {}
        if manager.is_generation:  # an embedding engine dies of these
            patience.paced(manager)
            self._serving = {
                "/v1/chat/completions": (ChatCompletionRequest, Chat(manager, templates)),
                "/v1/completions": (CompletionRequest, Completion(manager, templates)),
            }
        served = {} if self._emulated else Endpoints(manager, templates, model_name).served
        self._others = OtherCalls(served, self._vocab_size, self._in_flight.counted)

    async def start(self) -> None:
        """Attach to the running loop, and check that the plugin is in every scheduler process."""
        loop = asyncio.get_running_loop()
        self._manager.auto_create_handle_loop()
        # SGLang handles SIGTERM for its own server; this process belongs to the worker, which drains itself.
        loop.remove_signal_handler(signal.SIGTERM)
        wanted = {target for target, _, _ in hooks.hooks()}
        for state in await self.scheduler_states():
            missing = wanted - set(state["hooks"])
            if missing:
                raise EngineStartError(f"SGLang started without these batchweave hooks: {sorted(missing)}")
        if gpu_is_present() and not self._emulated and self._manager.is_generation:
            await kernels.ask_for_each(self._engine)
        self._watch.start()
        # All that is loaded now stays. A full collection that looks through it stops a process for a third of a second.
        gc.collect()
        await self._manager.freeze_gc()  # in the scheduler and the detokenizer too

    async def try_largest_step(self) -> None:
        """Compute one prompt as long as a step may be, so that the watch knows how long that takes.

        On a GPU its kernels are compiled by it.
        """
        if self._emulated or not self._manager.is_generation:
            return
        told = self._manager.server_args
        chunk = int(told.chunked_prefill_size or 0)
        room = min(self.context_length, int(self._manager.max_req_input_len), int(told.max_prefill_tokens)) - 2
        await kernels.ask_for_prompt(self._engine, min(chunk, room) if chunk > 0 else room, self._vocab_size)
        await self._manager.flush_cache()

    @property
    def step_age_s(self) -> float:
        """Seconds since the last step ended; 0 while nothing is in flight."""
        return self._watch.health.age_s

    @property
    def machine(self) -> str:
        return machine_name()

    @property
    def memory_bytes(self) -> int | None:
        """The memory of one accelerator; None without one."""
        return accelerator_memory()

    @property
    def endpoints(self) -> list[str]:
        """The endpoints that the model serves."""
        return [*self._serving, *self._others.served]

    @property
    def parsers(self) -> dict[str, str | None]:
        """What finds tool calls and thoughts in answers; empty if nothing does."""
        arguments = self._manager.server_args
        return {"tool_parser": arguments.tool_call_parser or "", "reasoning_parser": arguments.reasoning_parser or ""}

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return int(self._manager.model_config.context_len)

    async def scheduler_states(self) -> list[dict[str, Any]]:
        """Return batchweave's part of each scheduler's internal state, one per data-parallel rank."""
        states = await self._manager.get_internal_state()
        return [state.get("batchweave", {"hooks": []}) for state in states]

    async def max_running_requests(self) -> int:
        """Return how many requests the engine decodes at once, over all data-parallel ranks."""
        states = await self._manager.get_internal_state()
        return sum(int(state["effective_max_running_requests_per_dp"]) for state in states)

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        """Run one request; requests of one `kind` are alike, such as those of one batch.

        It answers bad requests with 4xx, and never raises for them.
        """
        is_online.set(False)
        patience.begin(terms.project)
        fields = plain(endpoint, {key: value for key, value in body.items() if key not in RESERVED_FIELDS})
        size = text_size(endpoint, fields)
        if (refusal := self._refused(endpoint, fields, size)) is not None:
            return refusal
        if endpoint in self._others.served:
            return await self._others.run(endpoint, fields, Told(rid, kind, terms=terms))
        request = self._read(endpoint, fields, rid)
        if isinstance(request, Answer):
            return request
        request.custom_params = marks(kind, terms)
        known = Told(rid, kind, guard.prompts_in(request))
        with self._in_flight.counted(known):
            response: Any = await self._serving[endpoint][1].answer(request, size.total, known)
        return self._answer_of(response, added_fields(None, self._emulated), fields, known)

    def refusal(self, slo: str) -> str | None:
        """Return why an online request of this class would be late; None if it may be served."""
        return None if self._shedding is None else self._shedding.refusal(slo)

    async def serve(
        self,
        endpoint: str,
        body: dict[str, Any],
        rid: str,
        slo: str = DEFAULT,
        size: int = 0,
        project: str = "",
        weight: float = 1.0,
    ) -> "Answer | Stream":
        """Answer an online request of the class `slo` and of `size` bytes, which goes before the requests of batches.

        Returns the answer once it is whole or, if the body asks for a stream, with its first token. A request ends
        early when this call is cancelled or its stream is closed. It answers bad requests with 4xx.
        """
        patience.begin(project)
        fields = plain(endpoint, {key: body[key] for key in body.keys() - (RESERVED_FIELDS - STREAM_FIELDS)})
        text = text_size(endpoint, fields)
        if (refusal := self._refused(endpoint, fields, text)) is not None:
            return refusal
        most = MOST_TOKEN_BYTES * self.context_length
        if text.total > most:  # of many prompts, for which all others would wait
            message = (
                f"An online request may have {most} bytes of text, not {text.total}. Send it in parts, or in a batch."
            )
            return Answer(400, error_body(message, text.field))
        request: Any = None if endpoint in self._others.served else self._read(endpoint, fields, rid)
        if isinstance(request, Answer):
            return request
        if self._shedding is not None:
            self._shedding.sent(slo, size)
        if endpoint in self._others.served:
            events = self._others.events(endpoint, fields, Told(rid, ONLINE, slo=slo, project=project, weight=weight))
        else:
            request.custom_params = online_marks(slo, project, weight) or None
            events = self._events(self._serving[endpoint][1], request, slo, fields, text.total)
        first = await anext(events)
        if isinstance(first, Answer):
            await events.aclose()
            return first
        return Stream(first, events)

    async def _events(
        self, serving: Serving, request: Any, slo: str, body: dict[str, Any], text_bytes: int
    ) -> "AsyncGenerator[Answer | bytes, None]":
        """Yield the answer as a whole, or its server-sent events; abort the request if nobody waits for the rest."""
        known = Told(request.rid, ONLINE, guard.prompts_in(request), slo=slo)
        with self._in_flight.counted(known):
            response: Any = await serving.answer(request, text_bytes, known)
            fields = added_fields(slo, self._emulated)
            if not isinstance(response, StreamingResponse):
                yield self._answer_of(response, fields, body, known)
                return
            async for event in response.body_iterator:
                yield event_with_fields(event.encode() if isinstance(event, str) else bytes(event), fields)

    def _refused(self, endpoint: str, fields: dict[str, Any], size: TextSize) -> Answer | None:
        """Return the refusal of a body that SGLang would answer otherwise, or make millions of tokens of."""
        if fault := unserved(endpoint, fields):
            return Answer(400, error_body(f"{fault[0]}: {fault[1]}", fault[0]))
        if size.longest > MOST_TOKEN_BYTES * self.context_length:
            message = f"The request is longer than the model's context length of {self.context_length} tokens."
            return Answer(400, error_body(message, size.field, "context_length_exceeded"))
        return None

    def _read(self, endpoint: str, fields: dict[str, Any], rid: str) -> Any:
        """Return SGLang's request, with an rid and without marks of ours, or the Answer that refuses it."""
        if endpoint not in self._serving:
            return Answer(400, error_body(f"The model does not support {endpoint}.", "url"))
        try:
            request: Any = self._serving[endpoint][0].model_validate(fields)
        except Exception as error:  # SGLang's own validators raise all kinds of errors on odd types
            return refused(error, fields)
        fault = guard.fault(request, self._vocab_size)
        if fault is not None:
            return Answer(400, error_body(f"{fault[0]}: {fault[1]}", fault[0]))
        if self._emulated and (getattr(request, "logprobs", None) or getattr(request, "response_format", None)):
            return Answer(400, error_body("An emulated device computes no logits.", None))
        request.rid = rid
        return request

    @staticmethod
    def _answer_of(response: Any, fields: bytes, body: dict[str, Any], known: Told) -> Answer:
        """Return what SGLang answered to a body as a whole, with these fields."""
        if known.aborted:
            return ABORTED
        if isinstance(response, Written):
            return Answer(200, with_fields(response.body, fields), response.aborted, response.looped)
        return failed(response.status_code, bytes(response.body), body)

    def measure_steps(self, steps: Path) -> AsyncIterator[str]:
        """Run steps of all kinds under SGLang's own scheduling, and yield a description before each part.

        At the end the steps are in the file `steps`, which the options must name.
        """
        return measure_steps(self._engine, steps)

    async def blended_load(self, cost: CostModel, seconds: float, limit_s: float | None = None) -> float:
        """Run `seconds` of compute and `seconds` of reads, by `cost`, as a batch's requests; return the time it took.

        Raises TimeoutError after `limit_s`.
        """

        def marks(tokens: int) -> dict[str, Any]:
            return {KIND: str(tokens), UNTOLD: True}

        return await time_blend(self._engine, cost, seconds, marks, limit_s)

    def abort(self, rid: str) -> None:
        """End a request that waits or runs; its `run` returns soon, with `aborted` set."""
        self._in_flight.abort(rid)

    async def withdraw(self, rids: Sequence[str], most: int) -> None:
        """Take up to `most` of these requests out of the engine, of those that have not begun, in this order.

        Returns once `run` has returned, with `aborted` set, for each that came back.
        """
        await self._in_flight.withdraw(rids, most)

    def close(self) -> None:
        self._watch.stop()
        shut_down(self._engine)
        self._pulses.close()
