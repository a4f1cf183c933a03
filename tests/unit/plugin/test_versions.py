"""An engine that nobody has tested does not start by chance."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from engine_ext.errors import EngineStartError
from engine_ext.plugin import versions


def test_an_untested_version_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.9.9")
    with pytest.raises(EngineStartError, match=r"pip install 'sglang==0\.5\.17'.*set BATCHWEAVE_SGLANG=0\.9\.9"):
        versions.check()
    with pytest.raises(EngineStartError):
        versions.check("0.9.8")
    versions.check("0.9.9")


def test_the_tested_version_is_the_one_that_is_installed() -> None:
    pinned = re.findall(r'"sglang==([^"]+)"', (Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert pinned == [versions.TESTED[-1]]
    versions.check()
