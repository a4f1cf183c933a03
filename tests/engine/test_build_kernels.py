"""Kernels for a GPU, compiled where there is none: by what pip brought, as on a machine without CUDA's toolkit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from service.worker.compilers import put_on_path

COMMAND = [sys.executable, "-m", "engine_ext.plugin.build_kernels"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc is for Linux")
def test_a_kernel_is_built_once(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TVM_FFI_CACHE_DIR": str(tmp_path / "kernels")}
    assert put_on_path(environment) == []
    built: list[int] = []
    for _ in range(2):
        done = subprocess.run([*COMMAND, "9.0", "--only", "clamp"], env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stdout[:12]) == (0, b"clamp: built"), done.stdout + done.stderr
        [library] = (tmp_path / "kernels").glob("*arch_9.0a*/*.so")
        built.append(library.stat().st_mtime_ns)
    assert built[0] == built[1]


def test_what_is_no_capability_is_refused() -> None:
    done = subprocess.run([*COMMAND, "hopper"], env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "hopper is no compute capability, such as 9.0" in done.stderr
