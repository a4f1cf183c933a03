"""The schemas of tools hold up nobody: few are checked in the event loop, equal ones once, and errors are short."""

import time
from typing import Any

import pytest
from jsonschema import SchemaError

from engine_ext.plugin.worker import tool_schemas
from engine_ext.plugin.worker.refusals import MOST_SAID
from engine_ext.plugin.worker.tool_schemas import MANY, ToolSchemas, are_many


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


def test_what_is_nested_too_deep_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = {}
    for _ in range(600):
        deep = {"not": deep}
    with pytest.raises(SchemaError, match="deep"):
        ToolSchemas.check_schema(deep)
    monkeypatch.setattr(tool_schemas, "Draft202012Validator", None)
    with pytest.raises(SchemaError, match="deep"):
        ToolSchemas.check_schema(deep)


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
