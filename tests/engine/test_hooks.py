"""Which hooks load: those that the options need, and none in an SGLang that batchweave did not start."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

from engine_ext.plugin import hooks
from engine_ext.plugin.options import VARIABLE

LOADED = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print([target for target, found in HookRegistry._hooks.items() for *_, by in found if by.dist_name == "batchweave"])
"""


def test_no_hook_is_wanted_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert hooks.hooks() == []


@pytest.mark.slow
def test_an_sglang_that_others_start_here_is_left_alone() -> None:
    """batchweave is installed beside it, so SGLang finds its entry point."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    found = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, timeout=300)
    assert found.stdout.decode().splitlines()[-1] == "[]", found.stderr.decode()[-2000:]
