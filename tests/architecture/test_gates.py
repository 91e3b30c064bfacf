"""What every module keeps to."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.architecture.source import ROOT, modules, parsed, shown

Function = ast.FunctionDef | ast.AsyncFunctionDef
MODULE_LINES = 300
FUNCTION_LINES = 50
LONG_FUNCTIONS: dict[str, str] = {}
"""`path:function` to the reason why it is longer."""
BROAD_EXCEPT = {"redco_cli/plugin/guard.py": "plugin code is the user's: whatever it raises is theirs to see"}
"""Modules that may catch every exception, with the reason."""


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


def test_no_module_is_long():
    lengths = {shown(path): len(path.read_text().splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > MODULE_LINES} == {}


def test_no_function_is_long():
    lengths = {f"{shown(path)}:{one.name}": body_lines(one) for path in modules() for one in functions(parsed(path))}
    assert {name for name, length in lengths.items() if length > FUNCTION_LINES} == set(LONG_FUNCTIONS)


def test_everything_public_is_documented():
    bare = [shown(path) for path in modules() if not ast.get_docstring(parsed(path))]
    for path in modules():
        for node in public(parsed(path).body):
            if not ast.get_docstring(node) and node.name != "__init__" and not is_setter(node):
                bare.append(f"{shown(path)}:{node.lineno}: {node.name}")
    assert bare == []


def test_every_function_is_annotated():
    bare = []
    for path in modules():
        for node in functions(parsed(path)):
            spec = node.args
            given = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
            missing = [one.arg for one in given if one.annotation is None and one.arg not in ("self", "cls")]
            if missing or node.returns is None:
                bare.append(f"{shown(path)}:{node.lineno}: {node.name}")
    assert bare == []


def test_only_the_guard_catches_everything():
    broad = {
        shown(path)
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(node.type))))
    }
    assert broad == set(BROAD_EXCEPT)


def test_prints_are_marked():
    """Only `console` draws; a print elsewhere says why on its line: `# noqa: T201 - a file`."""
    unmarked = [
        f"{shown(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
        and "# noqa: T201 - " not in path.read_text().splitlines()[node.lineno - 1]
    ]
    assert unmarked == []


def test_what_is_ignored_is_named():
    """`# noqa` and `# type: ignore` say which rule they mean."""
    bare = []
    for path in modules():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            text = token.string if token.type == tokenize.COMMENT else ""
            if re.search(r"noqa(?!: )|type: ignore(?!\[)", text):
                bare.append(f"{shown(path)}:{token.start[0]}")
    assert bare == []


def test_there_is_no_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [shown(path) for path in modules() if drawers & {path.stem, path.parent.name}] == []


def test_every_test_file_has_tests():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [shown(path) for path in files if not any(f.name.startswith("test_") for f in functions(parsed(path)))] == []


def test_no_module_of_the_tests_sets_the_environment_where_it_is_imported():
    """Doctests are collected from all of them: flags set so would be those of every process that a test starts.

    Other flags are other machine code: its sums differ in the last bit, and nothing that is kept is found.
    """
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path == ROOT / "tests" / "conftest.py":
            continue
        for statement in parsed(path).body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                found.append(f"{shown(path)}:{statement.lineno}")
    assert found == []
