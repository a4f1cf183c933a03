"""The rooms of the house, and who may know whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The rooms of `service`, bottom up: each imports only those before it. A file beside them is a room of its own.
ROOMS = (
    *("errors", "ids", "settings", "terminal", "endpoints"),
    *("webhooks", "db", "objects", "queue", "metrics", "estimates", "tenants"),
    *("requests", "workloads", "worker", "jobs", "api", "dashboard", "app"),
    *("demo", "remote", "up", "cli"),
)
PURE = ("engine_ext/plan", "engine_ext/simulate")
IO = {"asyncio", "io", "os", "pathlib", "random", "socket", "subprocess", "time", "datetime", "tempfile"}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def starts(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_engine_ext_never_imports_service() -> None:
    for path in sources("engine_ext"):
        assert not [name for name in imports(path) if starts(name, "service")], path


def test_only_the_plugin_imports_sglang_or_torch() -> None:
    for path in [*sources("service"), *sources("engine_ext")]:
        if not path.is_relative_to(ROOT / "engine_ext/plugin"):
            assert not [name for name in imports(path) if starts(name, "sglang", "torch")], path


def test_service_knows_plan_and_only_the_worker_knows_the_plugin() -> None:
    for path in sources("service"):
        for name in imports(path):
            if starts(name, "engine_ext"):
                also = {"worker": "engine_ext.plugin", "workloads": "engine_ext.simulate"}.get(path.parent.name)
                allowed = ("engine_ext.plan", also) if also else ("engine_ext.plan",)
                assert starts(name, *allowed), f"{path} imports {name}"


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "service").parts[0].removesuffix(".py")


def test_rooms_of_the_service_import_only_those_below() -> None:
    paths = [path for path in sources("service") if path.name != "__init__.py"]
    assert {room_of(path) for path in paths} == set(ROOMS)
    assert len(ROOMS) < 24  # a floor that one can keep in mind
    for path in paths:
        above = ROOMS[ROOMS.index(room_of(path)) + 1 :]
        known = imports(path)
        assert not [name for name in known if starts(name, *(f"service.{room}" for room in above))], path


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_know_plan_alone_and_do_no_input_or_output(room: str) -> None:
    assert sources(room)
    for path in sources(room):
        # These two keep machine code on disk.
        for name in imports(path) if path.name not in ("compiled.py", "warm_up.py") else set[str]():
            assert not starts(name, *IO), f"{path} imports {name}"
            if starts(name, "engine_ext"):
                assert starts(name, "engine_ext.plan", room.replace("/", ".")), f"{path} imports {name}"


def test_remote_commands_know_no_other_room() -> None:
    for path in sources("service/remote"):
        for name in imports(path):
            ours = starts(name, "service", "engine_ext")
            assert not ours or starts(name, "service.remote", "service.terminal"), f"{path} imports {name}"


def test_only_settings_reads_the_environment() -> None:
    for path in sources("service"):
        if path.name not in ("settings.py", "supervisor.py", "table.py"):  # they hand it on, to children and to the shell
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path
