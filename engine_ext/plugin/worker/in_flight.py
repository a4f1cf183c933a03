"""Knows the requests that an engine runs, and ends them."""

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from engine_ext.plugin.withdrawal import withdrawal_of
from engine_ext.plugin.worker.marked import Told

LOOKS_S = 0.002  # between two looks at whether withdrawn requests are gone


class InFlight:
    """The requests in flight through one of SGLang's tokenizer managers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._told: dict[str, Told] = {}  # by rid
        self._since: float | None = None  # since when any is in flight, by the monotonic clock

    def works_since(self) -> float | None:
        """Return since when the engine has requests, by the monotonic clock; None if it has none.

        A stream that is still being read may have ended in the engine.
        """
        return self._since if self._manager.rid_to_state else None

    @contextmanager
    def counted(self, known: Told) -> Generator[None, None, None]:
        """Count a request as in flight during the block, and end it in SGLang if the block raises."""
        if self.works_since() is None:
            self._since = time.monotonic()
        self._told[known.rid] = known
        try:
            yield
        except BaseException:  # a cancelled task, or a stream that was closed: nobody waits for it any more
            self._end(known)
            raise
        finally:
            del self._told[known.rid]
            if not self._told:
                self._since = None

    def abort(self, rid: str) -> None:
        """Note that a request is aborted, and end it in SGLang, which does not know it while its text is converted."""
        if (known := self._told.get(rid)) is not None:
            known.aborted = True
            self._end(known)

    def _end(self, known: Told) -> None:
        self._manager.abort_request(known.rid)
        if not known.parts:
            return
        states, split = self._manager.rid_to_state, self._manager.logical_rid_to_child_rids
        # SGLang runs each prompt of a list as a request of its own, with an rid of this form.
        for rid in (f"{known.rid}_{part}" for part in range(known.parts)):
            if rid in split:  # each of several answers is a request, with a name of its own
                self._manager.abort_request(rid)
            elif rid in states:
                states[rid].abort_requested = True  # in case it is not sent yet
        # An abort means all whose rid begins so. One for each would join and divide all decodes as often.
        self._manager._dispatch_to_scheduler(AbortReq(rid=f"{known.rid}_"))

    async def withdraw(self, rids: Sequence[str], most: int) -> None:
        """Take up to `most` of these requests out of the engine, of those that have not begun, in this order.

        Returns once those that came back are no longer in flight.
        """
        states, split = self._manager.rid_to_state, self._manager.logical_rid_to_child_rids
        # Those that SGLang runs as several requests, as for `n`, stay; it forgets their own state while they run.
        asked = {rid: states[rid] for rid in rids if rid in states and rid not in split and not self._told[rid].parts}
        if not asked:
            return
        self._manager._dispatch_to_scheduler(withdrawal_of(list(asked), most))
        await self._manager.get_internal_state()  # each scheduler answers it after the withdrawal
        ended = {rid for rid, state in asked.items() if state.finished}
        while any(rid in self._told for rid in ended):
            await asyncio.sleep(LOOKS_S)
