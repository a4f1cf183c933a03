"""A transaction that writes waits for nothing but its database: on SQLite it holds the only lock."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "service"


def writes(node: ast.AST) -> bool:
    """Whether this is `async with ….write() as session`."""
    return isinstance(node, ast.AsyncWith) and any(
        ".write(" in ast.unparse(item.context_expr)
        and item.optional_vars is not None
        and ast.unparse(item.optional_vars) == "session"
        for item in node.items
    )


def test_no_write_transaction_waits_for_anything_else() -> None:
    found, wrong = 0, list[str]()
    for path in sorted(ROOT.rglob("*.py")):
        for node in filter(writes, ast.walk(ast.parse(path.read_text()))):
            found += 1
            for each in ast.walk(node):
                if not isinstance(each, ast.Await | ast.AsyncFor | ast.AsyncWith) or each is node:
                    continue
                call = each.value if isinstance(each, ast.Await) else each
                is_sql = isinstance(call, ast.Call) and (
                    ast.unparse(call.func).startswith("session.")
                    or any(isinstance(given, ast.Name) and given.id == "session" for given in call.args)
                )
                if not is_sql:
                    wrong.append(f"{path.relative_to(ROOT)}:{each.lineno}")
    assert found > 40
    assert not wrong
