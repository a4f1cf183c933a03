"""Where a worker finds the programs that compile kernels for a GPU."""

from pathlib import Path

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
