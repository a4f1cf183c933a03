"""Proves to processes of one service that they talk to each other; all derive it from the key that they share.

A worker knows by it that an online request comes from the service's own API, and the API that an address is a worker's:
a writer in Redis must not get online requests and the token.
"""

import hashlib
import hmac

from service.settings import Settings
from service.webhooks.secrets import sealing_key

# What the API tells a worker of an online request, beside its body: its id, its class, and whose it is.
REQUEST_ID, TIER, PROJECT, WEIGHT = "X-Request-Id", "X-Service-Tier", "X-Project", "X-Project-Weight"


def deployment_token(settings: Settings) -> str | None:
    """Return the token that only processes of this service can derive; None if they share no key (`sealing_key`)."""
    key = sealing_key(settings)
    return None if key is None else hmac.new(key.encode(), b"batchweave online requests", hashlib.sha256).hexdigest()


def address_proof(token: str, worker: str, model: str, address: str) -> str:
    """Return what a worker's heartbeat says to show that the address is its own."""
    said = "\0".join((worker, model, address))
    return hmac.new(token.encode(), said.encode(errors="replace"), hashlib.sha256).hexdigest()
