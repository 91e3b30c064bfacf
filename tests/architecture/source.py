"""The source tree as these tests read it: parsed, never imported."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "redco_cli"


@functools.cache
def modules() -> tuple[Path, ...]:
    """Every module of the package, then every built-in plugin."""
    return (*sorted((ROOT / PACKAGE).rglob("*.py")), *sorted((ROOT / "plugins").glob("*.py")))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """`redco_cli/recipe/load.py` as `redco_cli.recipe.load`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports(path: Path, *, at_start: bool = False) -> tuple[tuple[int, str], ...]:
    """Line and full name of each module of the package that a module imports; `at_start`: only while it is imported."""
    return tuple(_imports(path, at_start))


def _imports(path: Path, at_start: bool) -> Iterator[tuple[int, str]]:
    known = {dotted(module) for module in modules()}
    tree = parsed(path)
    inside = {child for node in ast.walk(tree) if _is_lazy(node) for child in ast.walk(node)} if at_start else set()
    for node in ast.walk(tree):
        if node in inside:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in inner]
        for name in dict.fromkeys(names):
            if name.partition(".")[0] == PACKAGE:
                yield node.lineno, name


def _is_lazy(node: ast.AST) -> bool:
    is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return is_type_checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
