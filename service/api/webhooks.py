"""/v1/webhook_endpoints: URLs that are notified when a project's batches end. The calls are those of openai 3.54."""

from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import func, select, true, update
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.api.bodies import CreateWebhook, ObjectId, RotateSecret, TestWebhook, UpdateWebhook
from service.api.caller import CalledBy, CalledByAdmin
from service.api.context import Context, InContext
from service.api.idempotency import TriedAgain
from service.api.pages import page_rows
from service.api.shapes import Page
from service.api.webhook_shapes import EventTypes, WebhookDeleted, WebhookObject, WebhookTested, WebhookWithSecret
from service.db.clock import DAY_S
from service.db.moves import rows_changed
from service.db.tables import WebhookDelivery, WebhookEndpoint
from service.db.webhook_events import EVENT_TYPES, active_secrets, event_body
from service.errors import BadRequest, NotFound, QuotaReached
from service.tenants import audit
from service.tenants.keys import Caller
from service.tenants.quotas import hold
from service.webhooks.delivery import Reach, Unreachable, deliver
from service.webhooks.secrets import NoKey
from service.webhooks.signature import new_secret, signed_headers

MOST_ENDPOINTS = 100  # per project
CLAIM_S, TEST_RETRY_S = 60.0, 10

router = APIRouter(prefix="/v1", tags=["webhooks"])


@router.get("/webhook_event_types")
async def list_event_types(_caller: CalledBy) -> EventTypes:
    return EventTypes(data=list(EVENT_TYPES))


@router.post("/webhook_endpoints")
async def create_webhook(body: CreateWebhook, context: InContext, caller: CalledByAdmin) -> WebhookWithSecret:
    """Create a webhook endpoint. The response has its signing secret, shown only here and on rotation."""
    _check_url(body.url, context.settings.webhook_private)
    now, secret = int(context.clock()), new_secret()
    endpoint = WebhookEndpoint(
        id=ids.webhook_id(),
        project_id=caller.project.id,
        name=body.name,
        url=body.url,
        event_types=list(body.event_types),
        secret=_sealed(context, secret),
        created_at=now,
        updated_at=now,
    )
    async with context.database.write(caller.project.id) as session:
        await hold(session, caller.project.id)  # so that of two concurrent creates, one counts the other
        mine = (WebhookEndpoint.project_id == caller.project.id) & WebhookEndpoint.deleted_at.is_(None)
        count = select(func.count()).select_from(WebhookEndpoint).where(mine)
        if int((await session.execute(count)).scalar_one()) >= MOST_ENDPOINTS:
            message = f"A project can have at most {MOST_ENDPOINTS} webhook endpoints."
            raise BadRequest(message, code="too_many_endpoints")
        session.add(endpoint)
        audit.note(session, caller, "webhook.create", endpoint.id, now)
    return WebhookWithSecret.made(endpoint, context.seal, secret)


@router.get("/webhook_endpoints")
async def list_webhooks(
    context: InContext,
    caller: CalledByAdmin,
    after: ObjectId | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Page[WebhookObject]:
    query = select(WebhookEndpoint).where(WebhookEndpoint.deleted_at.is_(None))
    async with context.database.read() as session:
        rows = await page_rows(session, WebhookEndpoint, query, caller.project.id, after=after, limit=limit)
    return Page[WebhookObject].of([WebhookObject.of(row, context.seal) for row in rows], limit)


@router.get("/webhook_endpoints/{webhook_id}")
async def get_webhook(webhook_id: ObjectId, context: InContext, caller: CalledByAdmin) -> WebhookObject:
    async with context.database.read() as session:
        return WebhookObject.of(await _find(session, caller, webhook_id), context.seal)


@router.post("/webhook_endpoints/{webhook_id}")
async def update_webhook(
    webhook_id: ObjectId, body: UpdateWebhook, context: InContext, caller: CalledByAdmin
) -> WebhookObject:
    if body.url is not None:
        _check_url(body.url, context.settings.webhook_private)
    async with context.database.write() as session:
        endpoint = await _find(session, caller, webhook_id)
        changes = body.model_dump(exclude_none=True)
        if any(getattr(endpoint, key) != value for key, value in changes.items()):
            await _change(session, endpoint, updated_at=int(context.clock()), **changes)
            audit.note(session, caller, "webhook.update", webhook_id, context.clock(), ", ".join(changes))
        return WebhookObject.of(endpoint, context.seal)


@router.delete("/webhook_endpoints/{webhook_id}")
async def delete_webhook(webhook_id: ObjectId, context: InContext, caller: CalledByAdmin) -> WebhookDeleted:
    """Delete a webhook endpoint. Events that are not delivered yet are dropped."""
    async with context.database.write() as session:
        endpoint = await _find(session, caller, webhook_id)
        await _change(session, endpoint, deleted_at=int(context.clock()))
        await session.execute(
            update(WebhookDelivery).where(WebhookDelivery.endpoint_id == webhook_id).values(next_at=None)
        )
        audit.note(session, caller, "webhook.delete", webhook_id, context.clock())
    return WebhookDeleted(id=webhook_id)


@router.post("/webhook_endpoints/{webhook_id}/rotate_secret")
async def rotate_secret(
    webhook_id: ObjectId, context: InContext, caller: CalledByAdmin, again: TriedAgain, body: RotateSecret | None = None
) -> WebhookWithSecret:
    """Create a new signing secret. On request, the old one also keeps signing for 24 hours."""
    keep = body is not None and body.keep_old_secret_active_for_24_hours
    async with context.database.write() as session:
        endpoint = await _find(session, caller, webhook_id)
        now, secret = int(context.clock()), new_secret()
        # If an earlier attempt's response was lost, its secret was never seen, so the one before it must stay active.
        before = endpoint.old_secret if again.is_retry and (endpoint.old_secret_until or 0) > now else endpoint.secret
        await _change(
            session,
            endpoint,
            old_secret=before if keep else None,
            old_secret_until=now + DAY_S if keep else None,
            secret=_sealed(context, secret),
            updated_at=now,
        )
        audit.note(session, caller, "webhook.rotate_secret", webhook_id, now)
        return WebhookWithSecret.made(endpoint, context.seal, secret)


@router.post("/webhook_endpoints/{webhook_id}/test")
async def test_webhook(
    webhook_id: ObjectId, body: TestWebhook, context: InContext, caller: CalledByAdmin
) -> WebhookTested:
    """Deliver an event for a nonexistent batch right away. `status_code` is the status that the receiver returned."""
    now = context.clock()
    async with context.database.write() as session:
        endpoint = await _find(session, caller, webhook_id)
        free = (WebhookEndpoint.id == webhook_id) & func.coalesce(WebhookEndpoint.busy_until <= now, true())
        claim = update(WebhookEndpoint).where(free).values(busy_until=now + CLAIM_S)
        if rows_changed(await session.execute(claim)) != 1:
            message = "A delivery to this endpoint or another test is in progress."
            raise QuotaReached(message, TEST_RETRY_S, code="webhook_busy")
    sample = WebhookDelivery(id=ids.event_id(), type=body.event_type, batch_id="batch_test", created_at=int(now))
    content = event_body(sample)
    try:
        headers = signed_headers(sample.id, now, content, active_secrets(endpoint, context.seal, now))
        status = await deliver(endpoint.url, content, headers, Reach(context.settings.webhook_private))
    except NoKey as error:
        raise BadRequest(f"{error}.", code="webhooks_not_configured") from error
    except Unreachable as error:
        raise BadRequest(f"The URL cannot be reached: {error}.", code="webhook_unreachable", param="url") from error
    finally:
        async with context.database.write() as session:
            over = update(WebhookEndpoint).where(WebhookEndpoint.id == webhook_id).values(busy_until=None)
            await session.execute(over)
    taken = 200 <= status < 300
    return WebhookTested(event_type=body.event_type, status_code=status, success=taken, webhook_endpoint_id=webhook_id)


def _sealed(context: Context, secret: str) -> str:
    try:
        return context.seal.close(secret)
    except NoKey as error:
        raise BadRequest(f"Webhooks are not set up: {error}.", code="webhooks_not_configured") from error


def _check_url(url: str, private: bool) -> None:
    try:
        Reach(private).check(url)
    except Unreachable as error:
        raise BadRequest(f"'url' is not allowed: {error}.", code="invalid_url", param="url") from error


async def _find(session: AsyncSession, caller: Caller, webhook_id: str) -> WebhookEndpoint:
    mine = (WebhookEndpoint.id == webhook_id) & (WebhookEndpoint.project_id == caller.project.id)
    found = await session.scalars(select(WebhookEndpoint).where(mine, WebhookEndpoint.deleted_at.is_(None)))
    endpoint = found.one_or_none()
    if endpoint is None:
        raise NotFound(f"No such WebhookEndpoint object: {webhook_id}", param="webhook_endpoint_id")
    return endpoint


async def _change(session: AsyncSession, endpoint: WebhookEndpoint, **values: object) -> None:
    await session.execute(update(WebhookEndpoint).where(WebhookEndpoint.id == endpoint.id).values(**values))
    await session.refresh(endpoint)
