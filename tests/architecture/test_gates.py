"""What every module keeps to."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from source import ROOT, modules, parsed, shown

Function = ast.FunctionDef | ast.AsyncFunctionDef
MODULE_LINES = 300
FUNCTION_LINES = 50
LONG_FUNCTIONS: dict[str, str] = {}
"""`path:function` to the reason why it is longer."""
BROAD_EXCEPT = {"redco_cli/plugin/guard.py": "plugin code is the user's: whatever it raises is theirs to see"}
"""Modules that may catch every exception, with the reason."""

each_module = pytest.mark.parametrize("path", modules(), ids=shown)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def body_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return total - (docstring.end_lineno - docstring.lineno + 1)


def public(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Functions and classes by public name, and the public methods of those classes; `__init__` is one."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and (node.name == "__init__" or not node.name.startswith("_")):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def is_setter(node: ast.AST) -> bool:
    return isinstance(node, Function) and any(ast.unparse(one).endswith(".setter") for one in node.decorator_list)


@each_module
def test_no_module_is_long(path):
    assert len(path.read_text().splitlines()) <= MODULE_LINES


@each_module
def test_no_function_is_long(path):
    long = {f"{shown(path)}:{one.name}" for one in functions(parsed(path)) if body_lines(one) > FUNCTION_LINES}
    assert long == {name for name in LONG_FUNCTIONS if name.startswith(f"{shown(path)}:")}


@each_module
def test_every_module_and_public_name_is_documented(path):
    tree = parsed(path)
    assert ast.get_docstring(tree), "the module has no docstring"
    bare = [
        f"{shown(path)}:{node.lineno}: {node.name}"
        for node in public(tree.body)
        if not ast.get_docstring(node) and node.name != "__init__" and not is_setter(node)
    ]
    assert bare == []


@each_module
def test_every_function_is_annotated(path):
    bare = []
    for node in functions(parsed(path)):
        spec = node.args
        given = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
        missing = [one.arg for one in given if one.annotation is None and one.arg not in ("self", "cls")]
        if missing or node.returns is None:
            bare.append(f"{shown(path)}:{node.lineno}: {node.name}")
    assert bare == []


@each_module
def test_only_the_guard_catches_everything(path):
    broad = [
        f"{shown(path)}:{node.lineno}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or {"Exception", "BaseException"} & set(ast.unparse(node.type).strip("()").split(", ")))
    ]
    assert bool(broad) == (shown(path) in BROAD_EXCEPT), broad


@each_module
def test_prints_are_marked(path):
    """Only `console` draws; a print elsewhere says why on its line: `# noqa: T201 - a file`."""
    lines = path.read_text().splitlines()
    unmarked = [
        f"{shown(path)}:{node.lineno}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
        and not lines[node.lineno - 1].partition("# noqa: T201 - ")[2]
    ]
    assert unmarked == []


@each_module
def test_ignored_warnings_of_tools_are_named(path):
    """`# noqa` and `# type: ignore` say which rule they mean."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    bare = [
        f"{shown(path)}:{line}"
        for line, text in comments
        if ("noqa" in text and "noqa: " not in text) or ("type: ignore" in text and "type: ignore[" not in text)
    ]
    assert bare == []


def test_there_is_no_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [shown(path) for path in modules() if drawers & {path.stem, path.parent.name}] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=shown)
def test_every_test_file_has_tests(path: Path):
    assert any(one.name.startswith("test_") for one in functions(parsed(path)))
