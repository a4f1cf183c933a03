"""The fields of SGLang's objects that hooks touch: all of them are listed, and the installed SGLang has them."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from engine_ext.errors import EngineStartError
from engine_ext.plugin import sglang_fields
from engine_ext.plugin.sglang_fields import FIELDS, missing

SCHEDULER = Path(sglang_fields.__file__).parent / "scheduler"
# What the hooks call SGLang's objects, by class. Fields of our own begin with "batchweave".
CALLED = {
    "scheduler": "Scheduler",
    "req": "Req",
    "batch": "ScheduleBatch",
    "running": "ScheduleBatch",
    "adder": "PrefillAdder",
    "tree": "RadixCache",
}
# Of subclasses and of single engines: each file asks whether it is there, or its feature is chosen with this SGLang.
ELSEWHERE = ("pdmux.py", "nano.py", "host_copies.py", "adapters.py", "emulated.py", "steps.py", "ranks.py")


def test_the_installed_sglang_has_them() -> None:
    assert missing(FIELDS) == []


def test_every_field_that_a_hook_touches_is_listed() -> None:
    listed = {path.rpartition(".")[2]: names.split() for path, names in FIELDS.items()}
    touched = {
        (CALLED[node.value.id], node.attr, path.name)
        for path in SCHEDULER.glob("*.py")
        if path.name not in ELSEWHERE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CALLED
        if not node.attr.startswith("batchweave")
    }
    assert len(touched) > 80
    assert sorted(each for each in touched if each[1] not in listed[each[0]]) == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = "schedule_batch.Req", "schedule_batch.Request", "gone.Req"
    monkeypatch.setattr(sglang_fields, "FIELDS", {f"sglang.srt.managers.{name}": "rid uid" for name in classes})
    with pytest.raises(EngineStartError, match=r"Req\.uid, Request\.rid, Request\.uid, Req\.rid, Req\.uid\."):
        sglang_fields.check()
