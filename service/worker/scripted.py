"""An engine that answers by rules, without a model: for tests of what uses this service, and for our own.

Everything else is the service's: files, validation, plans, slices, leases, shards, retries, webhooks, online requests.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engine_ext.plugin.worker.answers import Answer, Stream, added_fields, error_body, with_fields
from service.worker.script import Rule, Script
from service.worker.scripted_bodies import ENDPOINTS, events, prompts_of, whole, words_of
from service.worker.slots import Slots

ABORTED = Answer(200, b'{"choices":[{"finish_reason":"abort"}]}', aborted=True)


class ScriptedEngine:
    """Answers the requests of batches and online ones as its script says. It needs neither SGLang nor a GPU."""

    device = machine = "scripted"
    memory_bytes = None
    endpoints: Sequence[str] = ENDPOINTS
    step_age_s = 0.0

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self._slots = Slots(self.script.at_once)
        self._aborts: dict[str, asyncio.Event] = {}  # of the requests in flight, by rid

    @property
    def context_length(self) -> int:
        return self.script.context_length

    async def start(self) -> None:
        """There is nothing to start."""

    def close(self) -> None:
        """There is nothing to close."""

    async def max_running_requests(self) -> int:
        return self.script.at_once

    async def scheduler_states(self) -> list[dict[str, Any]]:
        return []

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, due: float, lengths: str) -> Answer:
        async with self._runs(rid) as aborted:
            if aborted is None:
                return ABORTED
            prompts = _read(endpoint, body)
            if isinstance(prompts, Answer):
                return prompts
            rule = self.rule_for(prompts[0])
            if await self.pause(rule, rule.delay_s, aborted):
                return ABORTED
            if rule.status >= 400:
                return _error(rule.status)
            return _whole(endpoint, body, rid, prompts, rule)

    def refusal(self, slo: str) -> str | None:
        return None

    async def serve(self, endpoint: str, body: dict[str, Any], rid: str, slo: str, size: int = 0) -> Answer | Stream:
        if not body.get("stream"):
            answer = await self.run(endpoint, body, rid, "online", math.inf, "")
            return Answer(answer.status_code, with_fields(answer.body, added_fields(slo, None)), answer.aborted)
        prompts = _read(endpoint, body)
        if isinstance(prompts, Answer):
            return prompts
        rule, prompt = self.rule_for(prompts[0]), prompts[0]
        if rule.status >= 400:
            return _error(rule.status)
        answered = self._events(endpoint, body, rid, prompt, rule, slo)
        return Stream(await anext(answered), answered)

    async def _events(
        self, endpoint: str, body: dict[str, Any], rid: str, prompt: str, rule: Rule, slo: str
    ) -> AsyncGenerator[bytes]:
        async with self._runs(rid) as aborted:
            words, reason = _answer(rule, prompt, body)
            for event in events(endpoint, body, rid, words, reason, slo):
                if aborted is None or await self.pause(rule, rule.delay_s / max(1, len(words)), aborted):
                    raise RuntimeError("the request was aborted")
                yield event

    def rule_for(self, prompt: str) -> Rule:
        """Return the rule for the next attempt at a prompt."""
        return self.script.rule_for(prompt)

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
    async def _runs(self, rid: str) -> AsyncGenerator[asyncio.Event | None]:
        """Wait for a slot; yields an event that is set when the request is aborted, or None if it was withdrawn."""
        aborted = self._aborts[rid] = asyncio.Event()
        try:
            async with self._slots.enter(rid) as runs:
                yield aborted if runs else None
        finally:
            del self._aborts[rid]


def _read(endpoint: str, body: dict[str, Any]) -> list[str] | Answer:
    """Return the prompts of a request, one at least, or the Answer that refuses it."""
    if endpoint not in ENDPOINTS:
        return Answer(400, error_body(f"A scripted engine does not answer {endpoint}.", "url"))
    try:
        found = prompts_of(endpoint, body)
    except (KeyError, IndexError, TypeError, AttributeError):
        return Answer(400, error_body("The prompt cannot be read.", None))
    return found or Answer(400, error_body("There is no prompt.", None))


def _whole(endpoint: str, body: dict[str, Any], rid: str, prompts: list[str], rule: Rule) -> Answer:
    answers = [_answer(rule, prompt, body) for prompt in prompts]
    try:
        return Answer(200, json.dumps(whole(endpoint, body, rid, answers)).encode())
    except (TypeError, ValueError) as error:
        return Answer(400, error_body(f"A field has the wrong type: {error}", None))


def _answer(rule: Rule, prompt: str, body: dict[str, Any]) -> tuple[list[str], str]:
    words, reason = words_of(rule.answer, prompt, body)
    return words, rule.finish_reason or reason


def _error(status: int) -> Answer:
    code = "server_error" if status >= 500 else "invalid_request"
    return Answer(status, error_body(f"The script answers this request with {status}.", None, code))
