"""Records the webhook events of a batch that ends, in the transaction that ends it."""

from typing import Literal, get_args

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.db.tables import Batch, WebhookDelivery, WebhookEndpoint
from service.webhooks.secrets import Seal

EventType = Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
EVENT_TYPES: tuple[str, ...] = get_args(EventType)


async def note_event(session: AsyncSession, batch_id: str, event_type: str, now: float) -> None:
    """Queue a delivery of the event to each webhook of the batch's project that wants it."""
    wanted = (
        select(WebhookEndpoint)
        .join(Batch, Batch.project_id == WebhookEndpoint.project_id)
        .where(Batch.id == batch_id, WebhookEndpoint.deleted_at.is_(None))
    )
    for endpoint in (await session.scalars(wanted)).all():
        if event_type in endpoint.event_types:
            session.add(
                WebhookDelivery(
                    id=ids.event_id(),
                    endpoint_id=endpoint.id,
                    type=event_type,
                    batch_id=batch_id,
                    created_at=int(now),
                    next_at=now,
                )
            )


def event_body(delivery: WebhookDelivery) -> bytes:
    return msgspec.json.encode(
        {
            "id": delivery.id,
            "object": "event",
            "created_at": delivery.created_at,
            "type": delivery.type,
            "data": {"id": delivery.batch_id},
        }
    )


def active_secrets(endpoint: WebhookEndpoint, seal: Seal, now: float) -> list[str]:
    """Return the secret and, if its owner asked to keep it for a day, the one before. Raises NoKey."""
    stored = [endpoint.secret]
    if endpoint.old_secret is not None and (endpoint.old_secret_until or 0) > now:
        stored.append(endpoint.old_secret)
    return [seal.open(each) for each in stored]
