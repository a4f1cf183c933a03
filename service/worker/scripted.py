"""An engine that answers by rules, without a model: for tests of what uses this service, and for our own.

Everything else is the service's: files, validation, plans, slices, leases, shards, retries, webhooks, online requests.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engine_ext.coserve.slo import DEFAULT, FLEX, PRIORITY
from engine_ext.plugin.marks import NO_TERMS, Terms
from engine_ext.plugin.worker.answers import Answer, Stream, added_fields, error_body, with_fields
from engine_ext.plugin.worker.bodies import plain, unserved
from service.db.models import NO_PARSERS
from service.worker.script import Rule, Rules, Script
from service.worker.scripted_bodies import EMBEDDINGS, ENDPOINTS, choices_of, events, prompts_of, whole, words_of
from service.worker.slots import Slots

RANKS = {f"online {slo}": rank for rank, slo in enumerate((PRIORITY, DEFAULT, FLEX))}
BATCH = len(RANKS)  # the rank of batches' requests, which come after all online ones
LARGE = 10_000  # characters of prompts, from which on an answer is made in a thread
ABORTED = Answer(200, b'{"choices":[{"finish_reason":"abort"}]}', aborted=True)


class ScriptedEngine:
    """Answers the requests of batches and online ones as its script says. It needs neither SGLang nor a GPU."""

    device = machine = "scripted"
    memory_bytes = None
    endpoints: Sequence[str] = ENDPOINTS
    step_age_s = 0.0

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self._rules = Rules(self.script)
        self._slots = Slots(self.script.at_once)
        self._aborts: dict[str, asyncio.Event] = {}  # of the requests in flight, by rid

    @property
    def parsers(self) -> Mapping[str, str | None]:
        """Nothing is known of its tool calls and thoughts: rules write the answers."""
        return NO_PARSERS

    @property
    def context_length(self) -> int:
        return self.script.context_length

    @property
    def running(self) -> int:
        """How many requests have a slot."""
        return self._slots.running

    async def start(self) -> None:
        """There is nothing to start."""

    def close(self) -> None:
        """There is nothing to close."""

    async def max_running_requests(self) -> int:
        return self.script.at_once

    async def scheduler_states(self) -> list[dict[str, Any]]:
        return []

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        async with self._runs(rid, RANKS.get(kind, BATCH)) as aborted:
            if aborted is None:
                return ABORTED
            found = self._read(endpoint, body)
            if isinstance(found, Answer):
                return found
            prompts, rule = found
            if await self.pause(rule, rule.delay_s, aborted):
                return ABORTED
            if rule.status >= 400:
                return _error(rule.status)
            if endpoint == EMBEDDINGS or body.get("n") or sum(map(len, prompts)) > LARGE:
                # It takes up to seconds, in which the worker would miss its heartbeats.
                return await asyncio.to_thread(self._whole, endpoint, body, rid, prompts, rule)
            return self._whole(endpoint, body, rid, prompts, rule)

    def _whole(self, endpoint: str, body: dict[str, Any], rid: str, prompts: list[str], rule: Rule) -> Answer:
        try:
            answer = whole(endpoint, body, rid, [_answer(rule, prompt, body) for prompt in prompts])
        except (TypeError, ValueError, AttributeError) as error:
            return _refused(f"A field has the wrong type: {error}")
        return Answer(200, with_fields(json.dumps(answer).encode(), added_fields(None, self.device)))

    def refusal(self, slo: str) -> str | None:
        return None

    async def serve(
        self,
        endpoint: str,
        body: dict[str, Any],
        rid: str,
        slo: str,
        size: int = 0,
        project: str = "",
        weight: float = 1.0,
    ) -> Answer | Stream:
        if not body.get("stream"):
            answer = await self.run(endpoint, body, rid, f"online {slo}", Terms(project=project))
            return Answer(answer.status_code, with_fields(answer.body, added_fields(slo, None)), answer.aborted)
        answered = self._events(endpoint, body, rid, slo)
        first = await anext(answered)
        if isinstance(first, Answer):
            await answered.aclose()
            return first
        return Stream(first, answered)

    async def _events(self, endpoint: str, body: dict[str, Any], rid: str, slo: str) -> AsyncGenerator[Answer | bytes]:
        """Yield the events of a stream, or the Answer that refuses it."""
        async with self._runs(rid, RANKS.get(f"online {slo}", BATCH)) as aborted:
            if aborted is None:
                raise RuntimeError("the request was aborted")
            found = self._read(endpoint, body)
            if isinstance(found, Answer):
                yield found
                return
            prompts, rule = found
            if rule.status >= 400:
                await self.pause(rule, rule.delay_s, aborted)
                yield _error(rule.status)
                return
            try:
                answers = [_answer(rule, prompt, body) for prompt in prompts]
                words = choices_of(body) * sum(len(each) for each, _ in answers)
                (body.get("stream_options") or {}).get("include_usage")
            except (TypeError, ValueError, AttributeError) as error:
                yield _refused(f"A field has the wrong type: {error}")
                return
            if not words and await self.pause(rule, rule.delay_s, aborted):
                raise RuntimeError("the request was aborted")
            for event, is_word in events(endpoint, body, rid, answers, slo, self.device):
                if is_word and await self.pause(rule, rule.delay_s / words, aborted):
                    raise RuntimeError("the request was aborted")
                yield event

    def _read(self, endpoint: str, body: dict[str, Any]) -> tuple[list[str], Rule] | Answer:
        """Return the prompts of a request and the rule that is for it, or the Answer that refuses it."""
        if endpoint not in ENDPOINTS:
            return _refused(f"A scripted engine does not answer {endpoint}.", "url")
        try:
            prompts = prompts_of(endpoint, body)
        except (KeyError, IndexError, TypeError, AttributeError):
            return _refused("The prompt cannot be read.")
        if fault := unserved(endpoint, plain(endpoint, body)):  # as SGLang's worker does
            return _refused(f"{fault[0]}: {fault[1]}", fault[0])
        return (prompts, self.rule_for(prompts[0])) if prompts else _refused("There is no prompt.")

    def rule_for(self, prompt: str) -> Rule:
        """Return the rule for the next attempt at a prompt."""
        return self._rules.rule_for(prompt)

    async def pause(self, rule: Rule, seconds: float, aborted: asyncio.Event) -> bool:
        """Wait, and commit the rule's fault; return whether the request was aborted."""
        if rule.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            async with asyncio.timeout(None if rule.fault == "hang" else seconds):
                await aborted.wait()
        except TimeoutError:
            return False
        return True

    def abort(self, rid: str) -> None:
        self._slots.abort(rid)
        if rid in self._aborts:
            self._aborts[rid].set()

    async def withdraw(self, rids: Sequence[str], most: int) -> None:
        await self._slots.withdraw(rids, most)

    @asynccontextmanager
    async def _runs(self, rid: str, rank: int) -> AsyncGenerator[asyncio.Event | None]:
        """Wait for a slot; yields an event that is set when the request is aborted, or None if it was withdrawn."""
        aborted = self._aborts[rid] = asyncio.Event()
        try:
            async with self._slots.enter(rid, rank) as runs:
                yield aborted if runs else None
        finally:
            del self._aborts[rid]


def _refused(message: str, param: str | None = None) -> Answer:
    return Answer(400, error_body(message, param))


def _answer(rule: Rule, prompt: str, body: dict[str, Any]) -> tuple[list[str], str]:
    words, reason = words_of(rule.answer, prompt, body)
    return words, rule.finish_reason or reason


def _error(status: int) -> Answer:
    code = "server_error" if status >= 500 else "invalid_request"
    return Answer(status, error_body(f"The script answers this request with {status}.", None, code))
