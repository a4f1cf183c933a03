"""The rooms of `service` and `engine_ext`, which are their packages and single files, and who may import whom."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The rooms of `service`, bottom up: each imports only those before it. A file beside them is a room of its own.
ROOMS = (
    *("errors", "ids", "endpoints", "settings"),
    *("webhooks", "db", "objects", "queue", "metrics", "estimates", "tenants"),
    *("requests", "workloads", "worker", "jobs", "api", "dashboard", "app"),
    *("demo", "up", "fleet", "cli"),
)
# The same of `engine_ext`; `compiled` makes machine code of all rooms, `arrays` is what it changes in place.
ENGINE_ROOMS = (
    "errors",
    "arrays",
    "compiled",
    "costs",
    "plan",
    "scan",
    "coserve",
    "step",
    "simulate",
    "warm_up",
    "plugin",
)
PURE = ("costs", "plan", "scan", "coserve", "step", "simulate")
OURS = {"batchweave", "service", "engine_ext", "migrations"}
PROCESSES = ("worker", "scheduler", "cpu")  # rooms of the plugin, by where a line runs; what is beside them crosses
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


def test_only_one_module_imports_ray() -> None:
    for path in [*sources("service"), *sources("engine_ext")]:
        if path != ROOT / "service/fleet/cluster.py":
            assert not [name for name in imports(path) if starts(name, "ray")], path


def test_service_knows_plan_and_only_the_worker_knows_the_plugin() -> None:
    for path in sources("service"):
        for name in imports(path):
            if starts(name, "engine_ext"):
                also = {"worker": "engine_ext.plugin", "workloads": "engine_ext.simulate"}.get(path.parent.name)
                allowed = (
                    "engine_ext.errors",
                    "engine_ext.warm_up",
                    "engine_ext.costs",
                    "engine_ext.plan",
                    "engine_ext.coserve",
                    *([also] if also else []),
                )
                assert starts(name, *allowed), f"{path} imports {name}"


def room_of(path: Path, package: str) -> str:
    return path.relative_to(ROOT / package).parts[0].removesuffix(".py")


@pytest.mark.parametrize(("package", "rooms"), [("service", ROOMS), ("engine_ext", ENGINE_ROOMS)])
def test_rooms_import_only_those_below(package: str, rooms: tuple[str, ...]) -> None:
    paths = [path for path in sources(package) if path != ROOT / package / "__init__.py"]
    assert {room_of(path, package) for path in paths} == set(rooms)
    assert len(rooms) < 25  # a floor that one can keep in mind
    for path in paths:
        above = rooms[rooms.index(room_of(path, package)) + 1 :]
        known = imports(path)
        assert not [name for name in known if starts(name, *(f"{package}.{room}" for room in above))], path


def test_files_import_each_other_in_no_circle() -> None:
    paths = [*sources("service"), *sources("engine_ext")]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    known = {
        file: {name if name in files else name.rpartition(".")[0] for name in imports(path)} & files.keys()
        for file, path in files.items()
    }
    order = list(TopologicalSorter(known).static_order())  # raises on a circle, and names it
    assert set(order) == files.keys()


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_do_no_input_or_output(room: str) -> None:
    for path in sources(f"engine_ext/{room}"):
        assert not [name for name in imports(path) if starts(name, *IO)], path


@pytest.mark.parametrize("process", PROCESSES)
def test_what_runs_in_one_process_imports_nothing_of_another(process: str) -> None:
    others = [f"engine_ext.plugin.{room}" for room in PROCESSES if room != process]
    for path in sources(f"engine_ext/plugin/{process}"):
        assert not [name for name in imports(path) if starts(name, *others)], path


def test_the_client_knows_nothing_of_the_service() -> None:
    for path in sources("client/batchweave"):
        for name in imports(path):
            assert not starts(name, "service", "engine_ext", "migrations"), f"{path} imports {name}"


def test_only_settings_reads_the_environment() -> None:
    for path in sources("service"):
        if path.name not in (
            "settings.py",
            "supervisor.py",
            "child.py",
            "table.py",
            "node.py",
            "compilers.py",
        ):  # they hand it on, to children and to the shell
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def loaded_after(program: str, *packages: str) -> set[str]:
    """Return which of these packages a program that another interpreter runs has loaded at its end."""
    names = f"print(*(name for name in {packages} if name in sys.modules))"
    command = [sys.executable, "-c", f"import sys\n{program}\n{names}"]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(ran.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_unit_tests_load_no_engine() -> None:
    collect = "import pytest\npytest.main(['--collect-only', '-qq', '-n', '0', '-p', 'no:cacheprovider', 'tests/unit'])"
    assert loaded_after(collect, "pytest", "sglang", "torch", "transformers", "ray") == {"pytest"}


def test_a_worker_loads_no_simulator() -> None:
    modules = ", ".join(f"service.worker.{file.stem}" for file in sources("service/worker"))
    assert not loaded_after(f"import {modules}", "engine_ext.simulate", "sglang", "ray")


def test_roles_without_an_engine_import_only_what_a_plain_install_has() -> None:
    roles = "service.app, service.cli.roles, service.jobs.runner, service.up.supervisor, service.worker.scripted"
    code = f"import sys, {roles}, service.worker.loop\n"
    code += "ours = [each for name, each in sys.modules.items() if name.split('.')[0] in ('service', 'engine_ext')]\n"
    code += "print(*[each.__file__ for each in ours if each.__file__], sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert str(ROOT / "engine_ext/plugin/worker/bodies.py") in loaded
    names = {name for file in loaded for name in at_the_top(Path(file))} - set(sys.stdlib_module_names) - OURS
    text = (ROOT / "requirements/server.txt").read_text()
    pinned = {each.replace("-", "_") for each in re.findall(r"^([a-z0-9.-]+)(?:\[.*\])?==", text, re.MULTILINE)}
    of = packages_distributions()
    assert {"fastapi", "jsonschema", "msgspec"} <= names
    assert {name for name in names if not {re.sub("[-.]+", "_", each).lower() for each in of[name]} & pinned} == set()


def at_the_top(file: Path) -> set[str]:
    """The packages that a file imports as soon as it is loaded."""
    found = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
