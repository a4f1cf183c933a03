"""Recognizes a create that is a retry, so that it returns the batch of the first attempt instead of a second batch.

The client sends `Idempotency-Key` if its caller set one. Its own retries carry no key, only the number of the retry in
`x-stainless-retry-count`: an identical create shortly before is then assumed to be the one whose response was lost.
"""

import hashlib
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.tables import Batch
from service.errors import BadRequest

RETRIES_WITHIN_S = 1800  # the client waits ten minutes for a response, and makes three attempts


class Again:
    """Holds what a request's headers say about being a retry."""

    def __init__(
        self,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")] = None,
        x_stainless_retry_count: Annotated[str | None, Header(max_length=16)] = None,
    ) -> None:
        self.key = idempotency_key
        self.is_retry = (x_stainless_retry_count or "0").isdecimal() and int(x_stainless_retry_count or "0") > 0

    async def find(self, session: AsyncSession, project_id: str, asked: str, now: int) -> Batch | None:
        """Return the batch that an earlier attempt created, or None.

        Raises BadRequest if the key was used for a different request.
        """
        if self.key is not None:
            same = (Batch.idempotency_key == self.key) & (Batch.project_id == project_id)
            found = (await session.scalars(select(Batch).where(same))).one_or_none()
            if found is not None and found.asked != asked:
                message = f"Idempotency-Key {self.key!r} was used with a different body; use a new key for a new batch."
                raise BadRequest(message, code="idempotency_key_reused", param="Idempotency-Key")
            return found
        if not self.is_retry:
            return None
        mine = (Batch.asked == asked) & (Batch.project_id == project_id)
        recent = mine & (Batch.created_at >= now - RETRIES_WITHIN_S)
        return (await session.scalars(select(Batch).where(recent).order_by(Batch.seq.desc()).limit(1))).one_or_none()


TriedAgain = Annotated[Again, Depends()]


def digest(asked: dict[str, Any]) -> str:
    """Return a digest that is the same for equal requests."""
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()
