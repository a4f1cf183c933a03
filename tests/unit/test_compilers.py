"""Where a worker finds the programs that compile kernels for a GPU."""

import sys
from pathlib import Path

import pytest

from service.worker.compilers import NEEDED, put_on_path


def programs(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch(mode=0o755)
    return folder


def test_what_pip_brought_is_put_on_the_path_behind_what_is_there(tmp_path: Path) -> None:
    system, of_cuda = (
        programs(tmp_path / "system", "g++", "ninja"),
        programs(tmp_path / "cu13" / "bin", "nvcc", "ninja"),
    )
    environment = {"PATH": str(system)}
    assert put_on_path(environment, lambda: [tmp_path / "nowhere", of_cuda]) == []
    assert environment == {"PATH": f"{system}:{of_cuda}", "CUDA_HOME": str(tmp_path / "cu13")}


def test_an_nvcc_that_is_on_the_path_stays_the_one(tmp_path: Path) -> None:
    system, of_cuda = programs(tmp_path / "system", *NEEDED), programs(tmp_path / "cu13" / "bin", "nvcc")
    environment = {"PATH": str(system)}
    assert put_on_path(environment, lambda: [of_cuda]) == []
    assert environment == {"PATH": str(system)}


def test_what_is_nowhere_is_named(tmp_path: Path) -> None:
    environment = {"CUDA_HOME": "/opt/cuda"}
    found = programs(tmp_path / "bin", "ninja")
    assert put_on_path(environment, lambda: [found]) == ["nvcc", "g++"]
    assert environment == {"CUDA_HOME": "/opt/cuda", "PATH": str(found)}


def test_a_linker_finds_the_library_that_pip_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    of_cuda = programs(tmp_path / "cu13" / "bin", *NEEDED)
    library = programs(tmp_path / "cu13" / "lib", "libcudart.so.13") / "libcudart.so.13"
    for _ in range(2):  # the second worker finds the link
        environment = {"LIBRARY_PATH": "/opt/lib"}
        assert put_on_path(environment, lambda: [of_cuda]) == []
        folder, kept = environment["LIBRARY_PATH"].split(":")
        assert kept == "/opt/lib"
        assert (Path(folder) / "libcudart.so").resolve() == library
