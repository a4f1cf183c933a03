"""Delivers webhook events at least once, with retries at growing intervals for three days, from any free process.

Each endpoint has at most one delivery in flight and each project at most two, so that a slow endpoint only affects its
owner. Projects take turns, the least recently served first. An endpoint that fails rests, longer with every failure.
"""

from collections.abc import Callable
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Select, exists, func, select, update
from sqlalchemy.orm import InstrumentedAttribute, aliased

from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import WebhookDelivery, WebhookEndpoint
from service.db.webhook_events import active_secrets, event_body
from service.metrics import tracing
from service.metrics.counters import DELIVERIES
from service.settings import Settings
from service.webhooks.delivery import Reach, Unreachable, deliver
from service.webhooks.secrets import NoKey, Seal, sealing_key
from service.webhooks.signature import signed_headers

FIRST_PAUSE_S, LONGEST_PAUSE_S, GIVE_UP_S = 5.0, 3600.0, 72 * 3600
CLAIM_S = 60.0  # longer than a delivery takes
OF_PROJECT = 2  # deliveries in flight per project
TRIES = 8  # to claim an endpoint, when other processes are faster
log = structlog.get_logger()


class Webhooks:
    """Delivers due events and records how each delivery went."""

    def __init__(self, database: Database, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._reach = Reach(settings.webhook_private)
        self._seal = Seal(sealing_key(settings))
        self._clock = clock

    async def run_once(self) -> bool:
        """Deliver one event that is due. Returns whether it found one."""
        claimed = await self._claim()
        if claimed is None:
            return False
        delivery, endpoint = claimed
        now = self._clock()
        body = event_body(delivery)
        try:
            headers = signed_headers(delivery.id, now, body, active_secrets(endpoint, self._seal, now))
            with tracing.stage("webhook", [delivery.batch_id], event=delivery.id):
                status = await deliver(endpoint.url, body, headers, self._reach)
            went_well, said = 200 <= status < 300, f"status {status}"
        except (Unreachable, NoKey) as error:
            went_well, said = False, str(error)
        DELIVERIES.labels("delivered" if went_well else "failed").inc()
        await self._note(delivery, endpoint, went_well, said)
        return True

    async def _claim(self) -> tuple[WebhookDelivery, WebhookEndpoint] | None:
        """Claim the next due delivery for CLAIM_S, so that no other process takes it; None if nothing is due."""
        for _ in range(TRIES):
            found = await self._first_due()
            if found is None or await self._take(found[1]):
                return found
        return None

    async def _first_due(self) -> tuple[WebhookDelivery, WebhookEndpoint] | None:
        now = self._clock()
        async with self._database.read() as session:
            endpoint = (await session.scalars(_next_endpoint(now))).one_or_none()
            if endpoint is None:
                return None
            due = (WebhookDelivery.endpoint_id == endpoint.id) & (WebhookDelivery.next_at <= now)
            first = select(WebhookDelivery).where(due).order_by(WebhookDelivery.next_at).limit(1)
            delivery = (await session.scalars(first)).one_or_none()
        return None if delivery is None else (delivery, endpoint)

    async def _take(self, endpoint: WebhookEndpoint) -> bool:
        """Claim the endpoint. Returns False if another process was first; then another endpoint is next."""
        now = self._clock()
        async with self._database.write() as session:
            mine = (WebhookEndpoint.id == endpoint.id) & _is_over(WebhookEndpoint.busy_until, now)
            claim = update(WebhookEndpoint).where(mine).values(busy_until=now + CLAIM_S, served_at=now)
            return rows_changed(await session.execute(claim)) == 1

    async def _note(self, delivery: WebhookDelivery, endpoint: WebhookEndpoint, went_well: bool, said: str) -> None:
        now = self._clock()
        attempts, failures = delivery.attempts + 1, 0 if went_well else endpoint.failures + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 20), LONGEST_PAUSE_S)
        rest_s = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE_S) if failures else None
        ends = went_well or now + pause_s > delivery.created_at + GIVE_UP_S
        async with self._database.write() as session:
            await session.execute(
                update(WebhookDelivery)
                .where(WebhookDelivery.seq == delivery.seq, WebhookDelivery.next_at.is_not(None))  # null: deleted
                .values(attempts=attempts, next_at=None if ends else now + pause_s, result=said[:200])
            )
            rests_until = now + rest_s if rest_s else None
            noted = {"busy_until": None, "rests_until": rests_until, "failures": failures, "last_result": said[:200]}
            await session.execute(update(WebhookEndpoint).where(WebhookEndpoint.id == endpoint.id).values(**noted))
        about = {"event_id": delivery.id, "endpoint": endpoint.id, "attempts": attempts, "result": said}
        if went_well:
            log.info("webhook", **about)
        else:
            log.warning("webhook failed", **about, gives_up=ends, endpoint_failures=failures, endpoint_rests_s=rest_s)


def _next_endpoint(now: float) -> Select[Any]:
    """Select an endpoint that has a due delivery and does not rest, of the least recently served project."""
    other = aliased(WebhookEndpoint)
    same = other.project_id == WebhookEndpoint.project_id
    busy = select(func.count()).select_from(other).where(same, other.busy_until > now).scalar_subquery()
    served_at = select(func.max(other.served_at)).where(same).scalar_subquery()
    due = exists().where(WebhookDelivery.endpoint_id == WebhookEndpoint.id, WebhookDelivery.next_at <= now)
    free = _is_over(WebhookEndpoint.busy_until, now) & _is_over(WebhookEndpoint.rests_until, now)
    return (
        select(WebhookEndpoint)
        .where(WebhookEndpoint.deleted_at.is_(None), free, due, busy < OF_PROJECT)
        .order_by(served_at, WebhookEndpoint.served_at, WebhookEndpoint.seq)
        .limit(1)
    )


def _is_over(until: InstrumentedAttribute[float | None], now: float) -> ColumnElement[bool]:
    return until.is_(None) | (until <= now)
