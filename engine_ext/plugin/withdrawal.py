"""Carries a worker's wish to have requests back that have not begun, as an abort of SGLang's.

So it goes the way of all aborts, and comes to every rank at the same place among the other messages. Its `rid` holds
several ids, and its message says how many of them to give back at most.
"""

from typing import Any

from sglang.srt.managers.io_struct import AbortReq

SEPARATOR = ","
BEGINNING = "batchweave: withdraw "


def ask_back(rids: list[str], most: int) -> AbortReq:
    """Return the message that asks for up to `most` of these requests, the first ones first."""
    return AbortReq(rid=SEPARATOR.join(rids), abort_message=f"{BEGINNING}{most}")


def asked_back(message: Any) -> tuple[list[str], int] | None:
    """Return the requests that a message asks for, and how many of them at most; None if it is an ordinary abort."""
    said = message.abort_message or ""
    if not said.startswith(BEGINNING):
        return None
    return message.rid.split(SEPARATOR), int(said.removeprefix(BEGINNING))
