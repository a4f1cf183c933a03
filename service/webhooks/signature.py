"""Signs webhooks by Standard Webhooks 1.0.0 (standardwebhooks.com), as `client.webhooks.unwrap` verifies them."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(24)).decode()


def signed_headers(event_id: str, now: float, body: bytes, secrets_in_use: Sequence[str]) -> dict[str, str]:
    """Return the headers with a signature by each secret, since receivers may still use the one before a rotation."""
    timestamp = str(int(now))
    signed = b".".join((event_id.encode(), timestamp.encode(), body))
    signatures = [
        base64.b64encode(hmac.digest(base64.b64decode(secret.removeprefix(PREFIX)), signed, hashlib.sha256)).decode()
        for secret in secrets_in_use
    ]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
        "content-type": "application/json",
        "user-agent": "batchweave",
    }
