"""The numbers that steer a step stand in one table of each room, and no name means two of them."""

import ast
from collections import Counter
from pathlib import Path

import engine_ext

ROOMS = ("plan", "scan", "coserve", "step")
HERE = Path(engine_ext.__file__).parent
# Units, and guards of arithmetic, which steer nothing.
ELSEWHERE = {"HOUR_S", "NOTHING_S", "SHORTEST_S"}


def _numbers(path: Path) -> list[str]:
    """Return the names of a module's numbers; counts, marks and places in arrays are whole and stay where they are."""
    found: list[str] = []
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant | ast.BinOp):
            is_table = path.name == "tuning.py"
            if is_table or (isinstance(each.value, ast.Constant) and isinstance(each.value.value, float)):
                found += [target.id for target in each.targets if isinstance(target, ast.Name)]
    return found


def test_each_number_has_a_name_of_its_own() -> None:
    names = Counter(name for room in ROOMS for name in _numbers(HERE / room / "tuning.py"))
    assert len(names) > 60
    assert [name for name, count in names.items() if count > 1] == []


def test_no_number_hides_beside_the_tables() -> None:
    others = (path for room in ROOMS for path in sorted((HERE / room).glob("*.py")) if path.name != "tuning.py")
    assert {name for path in others for name in _numbers(path)} <= ELSEWHERE
