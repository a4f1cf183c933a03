"""Writes and reads a withdrawal: a worker takes requests that have not begun out of its engine.

It is written as an abort of SGLang's, because every rank gets aborts at the same place among the other messages. Its
`rid` holds several ids, and its message the most to give back.
"""

from typing import Any

from sglang.srt.managers.io_struct import AbortReq

SEPARATOR = ","
BEGINNING = "batchweave: withdraw "


def withdrawal_of(rids: list[str], most: int) -> AbortReq:
    """Return the message that withdraws up to `most` of these requests, the first ones first."""
    return AbortReq(rid=SEPARATOR.join(rids), abort_message=f"{BEGINNING}{most}")


def read_withdrawal(message: Any) -> tuple[list[str], int] | None:
    """Return which requests a message withdraws, and how many of them at most; None if it is an ordinary abort."""
    said = message.abort_message or ""
    if not said.startswith(BEGINNING):
        return None
    return message.rid.split(SEPARATOR), int(said.removeprefix(BEGINNING))
