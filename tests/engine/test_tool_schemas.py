"""The schemas of tools hold up nobody: few are checked in the event loop, equal ones once, and errors are short."""

import time
from contextlib import suppress
from typing import Any

import pytest
from jsonschema import SchemaError

from engine_ext.plugin.worker import tool_schemas
from engine_ext.plugin.worker.tool_schemas import MANY, MOST_SAID, ToolSchemas, are_many


def nested(depth: int, leaf: Any) -> Any:
    return leaf if not depth else nested(depth - 1, {"items": leaf})


def test_errors_are_short_and_name_the_place() -> None:
    for _ in range(2):
        with pytest.raises(SchemaError) as caught:
            ToolSchemas.check_schema({"properties": {"a": {"type": ["x" * 100_000]}}})
        assert len(str(caught.value)) < 3 * MOST_SAID
        assert "properties" in str(caught.value)


def test_equal_schemas_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {f"p{k}": {"type": "string", "description": "once"} for k in range(9)}}
    ToolSchemas.check_schema(schema)
    monkeypatch.setattr(tool_schemas, "Draft202012Validator", None)
    ToolSchemas.check_schema(dict(schema))


def test_patterns_are_not_compiled() -> None:
    started = time.thread_time()
    ToolSchemas.check_schema({"allOf": [{"pattern": f"{k}(?i:[\x01-\uffff]{'a' * 200})"} for k in range(8)]})
    assert time.thread_time() - started < 0.5


def test_entries_that_cannot_be_sorted_are_compared_once_each() -> None:
    """Each with each took a minute for the names of one body, and again where the check then failed of its depth."""
    names = [0, *([f"{k:04}"] for k in range(9000))]
    started = time.thread_time()
    for _ in range(2):
        with pytest.raises(SchemaError):
            ToolSchemas.check_schema({"dependencies": {"a": names}})
    deep: Any = {}
    for _ in range(400):
        deep = {"not": deep}
    with suppress(SchemaError):
        ToolSchemas.check_schema({"dependencies": {"x": {"items": {"dependencies": {"a": names}}, "not": deep}}})
    assert time.thread_time() - started < 5
    with pytest.raises(SchemaError):
        ToolSchemas.check_schema({"required": ["a", "a"]})


@pytest.mark.parametrize(
    ("tools", "many"),
    [
        ([{"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(100)}}], False),
        ([{"prefixItems": [{}] * MANY}], True),
        ([{"prefixItems": [True] * MANY}], True),
        ([{"items": [[]] * MANY}], True),
        ([nested(400, {})], False),
        ([nested(600, {})], True),
        (None, False),
    ],
)
def test_the_check_of_many_schemas_is_done_beside_the_loop(tools: Any, many: bool) -> None:
    assert are_many(tools) == many
