"""Ids as clients see them: a prefix and 128 random bits, so that they cannot be guessed."""

import re
import secrets


def file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def early_file_ids(batch_id: str) -> tuple[str, str]:
    """Return the ids of the files in which a batch's output and errors are readable from the first answer on."""
    bits = batch_id.removeprefix("batch_")
    return f"file-{bits}-output", f"file-{bits}-errors"


def early_file(file_id: str) -> tuple[str, bool] | None:
    """Return the batch of this early file and whether the file is the output; None for any other file."""
    match = re.fullmatch(r"file-([0-9a-f]{32})-(output|errors)", file_id)
    return (f"batch_{match[1]}", match[2] == "output") if match else None


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
