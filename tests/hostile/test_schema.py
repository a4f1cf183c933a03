"""Every operation of openapi.yaml with values that fit its schema and values that do not, on objects there and not."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error, response_schema_conformance

from tests.hostile.server import Role

DESCRIPTION = Path(__file__).parents[2] / "openapi.yaml"
CHECKS = (not_a_server_error, response_schema_conformance)
SLOW = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much)
# Fixtures live as long as the test of an operation, which is what is meant.
EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=SLOW)

schema: Any = schemathesis.openapi.from_path(DESCRIPTION)


@pytest.fixture
def objects(api: Role) -> dict[str, str]:
    """Ids of things that are there, by the names that they have in paths."""
    with httpx.Client(base_url=f"{api.url}/v1") as client:
        file_id = client.post("/files", data={"purpose": "batch"}, files={"file": b"{}\n"}).json()["id"]
        batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        upload = {"bytes": 10, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}
        hook = {"name": "hook", "url": "https://example.com/hook", "event_types": ["batch.completed"]}
        return {
            "file_id": file_id,
            "batch_id": client.post("/batches", json=batch).json()["id"],
            "upload_id": client.post("/uploads", json=upload).json()["id"],
            "webhook_id": client.post("/webhook_endpoints", json=hook).json()["id"],
        }


def tells_its_fault(answer: Any) -> bool:
    """A success, or an error that no client tries again, in the shape that clients read."""
    if answer.status_code < 400:
        return True
    retried = answer.status_code in (408, 409, 429)
    return not retried and set(answer.json()["error"]) == {"message", "type", "param", "code"}


@schema.parametrize()
@EXAMPLES
def test_no_operation_fails(case: Any, api: Role) -> None:
    answer = case.call(base_url=api.url)
    case.validate_response(answer, checks=CHECKS)
    assert "Traceback" not in answer.text
    assert tells_its_fault(answer)


@schema.include(path_regex=r"\{(file|batch|upload|webhook)_id").parametrize()
@EXAMPLES
def test_no_operation_fails_on_what_is_there(case: Any, api: Role, objects: dict[str, str]) -> None:
    case.path_parameters = {name: objects.get(name, value) for name, value in case.path_parameters.items()}
    answer = case.call(base_url=api.url)
    case.validate_response(answer, checks=CHECKS)
    assert tells_its_fault(answer)
