"""Ids as clients see them: a prefix and 128 random bits, so that nobody guesses another's."""

import secrets


def file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def batch_request_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"


def index_id() -> str:
    return f"index_{secrets.token_hex(16)}"


def plan_id() -> str:
    return f"plan_{secrets.token_hex(16)}"


def upload_id() -> str:
    return f"upload_{secrets.token_hex(16)}"


def part_id() -> str:
    return f"part_{secrets.token_hex(16)}"


def webhook_id() -> str:
    return f"webhook_endpoint_{secrets.token_hex(16)}"


def event_id() -> str:
    return f"evt_{secrets.token_hex(16)}"


def project_id() -> str:
    return f"proj_{secrets.token_hex(16)}"


def key_id() -> str:
    return f"key_{secrets.token_hex(16)}"
