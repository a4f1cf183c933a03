"""Says what a worker needs of an engine to run batches on it."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine_ext.plugin.marks import NO_TERMS, Terms


class EngineAnswer(Protocol):
    """An answer to one request; engine_ext.plugin.worker.answers.Answer says what its parts mean."""

    @property
    def status_code(self) -> int: ...
    @property
    def body(self) -> bytes: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def looped(self) -> bool: ...


class Engine(Protocol):
    """An engine that answers the requests of batches; engine_ext.plugin.worker.host.EngineHost is the real one."""

    async def run(
        self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS
    ) -> EngineAnswer: ...
    def abort(self, rid: str) -> None: ...
    async def withdraw(self, rids: Sequence[str], most: int) -> None: ...
    @property
    def step_age_s(self) -> float: ...
    async def scheduler_states(self) -> list[dict[str, Any]]: ...
