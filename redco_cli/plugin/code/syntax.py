"""One file of Python as its definitions: which statement binds which name, and which names it uses.

A definition is its syntax tree: comments, formatting and docstrings are no part of it, nor is the version of Python
that read it.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Imports = ast.Import | ast.ImportFrom
Target = tuple[str, tuple[str, ...]]
"""What a name that is imported stands for: a module by its full name, and an attribute of it, or none."""
_NEVER_IMPORTED = frozenset({"__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING"})
"""Conditions that do not hold while a module is imported."""


@dataclass
class Module:
    """A file, read.

    Attributes:
        key: its path from the folder that imports start from.
        dotted: its full name.
        file: where it is.
        bindings: name to the statements at the top that define or import it.
        running: the other statements, which run at import.
        within: names that these define.
        stars: modules of which all names are imported.
        body: all statements that count, in their order.
    """

    key: str
    dotted: str
    file: Path
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    running: list[ast.stmt] = field(default_factory=list)
    within: set[str] = field(default_factory=set)
    stars: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)

    def offers(self, name: str) -> bool:
        """Whether one of its own statements defines or imports a name."""
        return name in self.bindings or name in self.within

    def base_of(self, node: ast.ImportFrom) -> str:
        """The full name of the module that an import is from."""
        is_package = self.file.name == "__init__.py"
        package = self.dotted.split(".") if is_package else self.dotted.split(".")[:-1]
        above = package[: max(len(package) - node.level + 1, 0)] if node.level else []
        return ".".join((*above, *filter(None, [node.module])))

    def targets(self, node: Imports) -> Iterator[tuple[str, Target]]:
        """The names that an import binds, and what each stands for."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                yield alias.asname or alias.name, (self.base_of(node), (alias.name,))
            elif alias.asname:
                yield alias.asname, (alias.name, ())
            else:
                yield alias.name.partition(".")[0], (alias.name.partition(".")[0], ())


def read_module(key: str, dotted: str, file: Path, source: str | bytes) -> Module:
    """A file with its statements sorted.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    module = Module(key, dotted, file)
    for statement in _imported(ast.parse(source).body):
        module.body.append(statement)
        if isinstance(statement, Imports):
            _bind_imports(module, statement)
        elif (names := _defined(statement)) is not None:
            for name in names:
                module.bindings.setdefault(name, []).append(statement)
        else:
            module.running.append(statement)
            _look_within(module, statement)
    return module


def _imported(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that do something when it is imported."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in _NEVER_IMPORTED:
            yield from _imported(statement.orelse)
        elif not _is_remark(statement):
            yield statement


def _is_remark(statement: object) -> bool:
    """Whether a statement is a docstring, or another constant that nothing is done with."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _defined(statement: ast.stmt) -> list[str] | None:
    """The names that a definition binds; None for a statement that is none."""
    if isinstance(statement, Definition):
        return [statement.name]
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    nodes = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.expr)]
    if not all(isinstance(node, ast.Name | ast.Tuple | ast.List | ast.Starred) for node in nodes):
        return None  # an attribute or an item of something that is known by another name
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def _look_within(module: Module, statement: ast.stmt) -> None:
    """Notes what a statement that runs at import defines and imports."""
    for node in ast.walk(statement):
        if isinstance(node, Imports):
            _bind_imports(module, node)
        elif isinstance(node, Definition):
            module.within.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            module.within.add(node.id)


def _bind_imports(module: Module, node: Imports) -> None:
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        module.stars.append(module.base_of(node))
        return
    for name, _ in module.targets(node):
        module.bindings.setdefault(name, []).append(node)


def canonical(node: object) -> str:
    """A syntax tree as text, the same for code that does the same but for its comments, formatting and docstrings."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in ("ctx", "kind"))
        inner = (f"{name}={canonical(value)}" for name, value in fields if value is not None and value != [])
        value = repr(node.value) if isinstance(node, ast.Constant) else " ".join(inner)
        return f"{type(node).__name__}({value})"
    if isinstance(node, list):
        return f"[{' '.join(canonical(one) for one in node if not _is_remark(one))}]"
    return repr(node)


def canonical_import(node: Imports, name: str) -> str:
    """The part of an import that binds one name."""
    origin = f"{'.' * node.level}{node.module or ''}" if isinstance(node, ast.ImportFrom) else ""
    found = [one.name for one in node.names if name in (one.asname, one.name, one.name.partition(".")[0])]
    return f"import {origin} {' '.join(found)}"


def used_names(statement: ast.stmt) -> set[str]:
    """The names of its module, or of Python, that a statement uses, wherever in it."""
    found: set[str] = set()
    tables = [symtable.symtable(ast.unparse(statement), "definition", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_inner = table.get_type() not in ("module", "class")
        found |= {
            one.get_name() for one in table.get_symbols() if (one.is_global() if is_inner else one.is_referenced())
        }
    return found


def chains(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every use of a name in a tree, with the attributes that are taken of it: `a.b.c` is `("a", ("b", "c"))`."""
    attributes: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        attributes.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield inner.id, tuple(reversed(attributes))
        return
    for child in ast.iter_child_nodes(inner):
        yield from chains(child)


def imports_in(statement: ast.stmt) -> list[Imports]:
    """The imports within a statement."""
    return [node for node in ast.walk(statement) if isinstance(node, Imports)]


def calls_something(statement: ast.stmt) -> bool:
    """Whether an assignment computes more than constants."""
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))
