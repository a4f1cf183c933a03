"""Delivers events: at least once, again with growing pauses for three days, by whichever process is free."""

from collections.abc import Callable

import structlog
from sqlalchemy import select, update

from service import tracing
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import WebhookDelivery, WebhookEndpoint
from service.metrics.counters import DELIVERIES
from service.settings import Settings
from service.webhooks.delivery import Reach, Unreachable, deliver
from service.webhooks.events import active_secrets, event_body
from service.webhooks.signature import signed_headers

FIRST_PAUSE_S, LONGEST_PAUSE_S, GIVE_UP_S = 5.0, 3600.0, 72 * 3600
CLAIM_S = 60.0  # longer than a delivery takes
log = structlog.get_logger()


class Webhooks:
    def __init__(self, database: Database, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._reach = Reach(settings.webhook_private)
        self._clock = clock

    async def run_once(self) -> bool:
        """Deliver one event that is due; whether there was one."""
        claimed = await self._claim()
        if claimed is None:
            return False
        delivery, endpoint = claimed
        now = self._clock()
        body = event_body(delivery)
        headers = signed_headers(delivery.id, now, body, active_secrets(endpoint, now))
        try:
            with tracing.stage("webhook", [delivery.batch_id], event=delivery.id):
                status = await deliver(endpoint.url, body, headers, self._reach)
            went_well, said = 200 <= status < 300, f"status {status}"
        except Unreachable as error:
            went_well, said = False, str(error)
        DELIVERIES.labels("delivered" if went_well else "failed").inc()
        await self._note(delivery, went_well, said)
        return True

    async def _claim(self) -> tuple[WebhookDelivery, WebhookEndpoint] | None:
        """The next that is due, which nobody else takes for a while."""
        now = self._clock()
        due = (
            select(WebhookDelivery, WebhookEndpoint)
            .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
            .where(WebhookDelivery.next_at <= now, WebhookEndpoint.deleted_at.is_(None))
            .order_by(WebhookDelivery.next_at)
            .limit(1)
        )
        async with self._database.read() as session:
            found = (await session.execute(due)).one_or_none()
        if found is None:
            return None
        async with self._database.write() as session:
            mine = (WebhookDelivery.seq == found[0].seq) & (WebhookDelivery.next_at == found[0].next_at)
            taken = await session.execute(update(WebhookDelivery).where(mine).values(next_at=now + CLAIM_S))
            return (found[0], found[1]) if rows_changed(taken) == 1 else None

    async def _note(self, delivery: WebhookDelivery, went_well: bool, said: str) -> None:
        now = self._clock()
        attempts = delivery.attempts + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 20), LONGEST_PAUSE_S)
        ends = went_well or now + pause_s > delivery.created_at + GIVE_UP_S
        async with self._database.write() as session:
            await session.execute(
                update(WebhookDelivery)
                .where(WebhookDelivery.seq == delivery.seq, WebhookDelivery.next_at.is_not(None))  # null: deleted
                .values(attempts=attempts, next_at=None if ends else now + pause_s, result=said[:200])
            )
            if not went_well:  # others to the same receiver wait too, or one that is dead would hold up everybody's
                others = (WebhookDelivery.endpoint_id == delivery.endpoint_id) & (WebhookDelivery.seq != delivery.seq)
                await session.execute(
                    update(WebhookDelivery)
                    .where(others, WebhookDelivery.next_at < now + pause_s)
                    .values(next_at=now + pause_s)
                )
        tell = log.info if went_well else log.warning
        tell("webhook", event_id=delivery.id, batch=delivery.batch_id, attempts=attempts, result=said, ended=ends)
