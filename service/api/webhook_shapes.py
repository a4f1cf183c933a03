"""Webhook endpoints as clients read them; a secret is shown only once, in the response that creates it."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.db.tables import WebhookEndpoint
from service.webhooks.secrets import NoKey, Seal


class WebhookExtras(BaseModel):
    """Results of the endpoint's deliveries.

    After a failed delivery the endpoint gets none until `rests_until` (Unix seconds); each further failure extends
    the pause.
    """

    failures: int = Field(description="Number of failed deliveries since the last successful one")
    rests_until: int | None
    last_result: str | None


class WebhookObject(BaseModel):
    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    batchweave: WebhookExtras

    @classmethod
    def of(cls, endpoint: WebhookEndpoint, seal: Seal) -> "WebhookObject":
        return cls(**_webhook_fields(endpoint, seal))


class WebhookWithSecret(WebhookObject):
    signing_secret: str

    @classmethod
    def made(cls, endpoint: WebhookEndpoint, seal: Seal, secret: str) -> "WebhookWithSecret":
        return cls(**_webhook_fields(endpoint, seal), signing_secret=secret)


def _webhook_fields(endpoint: WebhookEndpoint, seal: Seal) -> dict[str, Any]:
    try:
        hint = f"…{seal.open(endpoint.secret)[-4:]}"
    except NoKey:
        hint = "…"
    return {
        "id": endpoint.id,
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": hint,
        "batchweave": {
            "failures": endpoint.failures,
            "rests_until": int(endpoint.rests_until) if endpoint.rests_until else None,
            "last_result": endpoint.last_result,
        },
    }


class WebhookDeleted(BaseModel):
    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class WebhookTested(BaseModel):
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    event_type: str
    status_code: int
    success: bool = Field(description="Whether the receiver took it, with a status of 200 to 299")
    webhook_endpoint_id: str


class EventTypes(BaseModel):
    object: Literal["list"] = "list"
    data: list[str]
