r"""What functions reach: from the names that they use to definitions in the user's own files, and from there on.

What a name means can depend on more than can be read: `globals()`, a module that is passed on, a registry that
decorators fill. Then more counts, up to all of a file, rather than less.

>>> was = digests_of("def f(x):\n    'Adds.'\n    return x + ONE  # one\nONE = 1", "f")
>>> was == digests_of("ONE = 1\ndef f( x ): return x+ONE", "f"), list(was)
(True, ['plugin.py: ONE', 'plugin.py: f'])
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from redco_cli.plugin.code.modules import UserModules, python_files
from redco_cli.plugin.code.syntax import (
    Definition,
    Imports,
    Module,
    calls_something,
    canonical,
    canonical_import,
    chains,
    imports_in,
    read_module,
    used_names,
)

_AT_IMPORT = "what runs at import"
_ORDER = "the order of what runs at import"
_NAMERS = frozenset({"globals", "locals", "vars", "dir", "eval", "exec"})
"""Functions by which code can reach any name of its own file."""
_IMPORTERS = frozenset(
    {"import_module", "__import__", "run_path", "run_module", "spec_from_file_location", "SourceFileLoader", "exec"}
)
"""Functions by which code can import what no import says."""


def digests_of(source: str, *roots: str) -> dict[str, str]:
    """Digests of what some names of one file reach in it, given its text; for tests and examples."""
    reach = Reach(UserModules(Path("/nowhere")), read_module("plugin.py", "plugin", Path("/nowhere/plugin.py"), source))
    reach.follow(roots)
    return reach.digests()


def short_digest(content: bytes) -> str:
    """What tells a content from others, short enough to be read."""
    return hashlib.sha256(content).hexdigest()[:16]


class Reach:
    """What some names of a plugin reach."""

    def __init__(self, modules: UserModules, main: Module, free: Collection[str] = ()) -> None:
        """Nothing is reached yet.

        Args:
            modules: finds the others.
            main: the plugin.
            free: names of it that count only where something else uses them, whatever decorates them.
        """
        self._modules, self._main, self._free = modules, main, free
        self._known: dict[str, Module] = {}  # those that are imported, by key
        self._units: dict[tuple[str, str], list[ast.stmt]] = {}
        self._files: dict[str, str] = {}  # of which all counts
        self._seen: set[tuple[str, ...]] = set()
        self._todo: list[tuple[Module, ast.stmt]] = []

    def follow(self, roots: Sequence[str]) -> None:
        """Follows names of the plugin until there is nothing new. What runs at import is reached always."""
        self._execute(self._main)
        for root in (*roots, "__getattr__"):
            self._name(self._main, root, ())
        more = True
        while more:
            while self._todo:
                self._statement(*self._todo.pop())
            more = any(self._entangled(module) for module in list(self._known.values()))

    def add_file(self, file: Path) -> None:
        """Counts all of a file that no import names."""
        try:
            content = canonical(ast.parse(file.read_bytes())).encode("utf-8", "surrogatepass")
        except (SyntaxError, ValueError, RecursionError):
            content = file.read_bytes()
        self._files[file.name] = short_digest(content)

    def digests(self) -> dict[str, str]:
        """Digest of each definition, by file and name: `{"plugin.py: loss_fn": "3f..."}`."""
        found = dict(self._files)
        for file in self._modules.unreadable:
            found[file.name] = short_digest(file.read_bytes())
        for (key, name), statements in self._units.items():
            texts = [canonical_import(one, name) if isinstance(one, Imports) else canonical(one) for one in statements]
            found[f"{key}: {name}"] = short_digest("\n".join(texts).encode("utf-8", "surrogatepass"))
        for module in self._known.values():
            order = list(self._sequence(module))
            if len(order) > 1:
                found[f"{module.key}: {_ORDER}"] = short_digest("\n".join(order).encode("utf-8", "surrogatepass"))
        return dict(sorted(found.items()))

    def nodes(self) -> Iterator[ast.AST]:
        """Every node of every definition that is reached."""
        return (node for unit in self._units.values() for statement in unit for node in ast.walk(statement))

    def _sequence(self, module: Module) -> Iterator[str]:
        """What of a module computes something while it is imported, in its order: one may change what another sees."""
        for statement in module.body:
            names = [name for name, bound in module.bindings.items() if statement in bound]
            if statement in module.running:
                yield _AT_IMPORT
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and calls_something(statement):
                yield from (name for name in names if (module.key, name) in self._units)

    def _add(self, module: Module, name: str, statements: list[ast.stmt]) -> None:
        if (module.key, name) not in self._units:
            self._units[module.key, name] = statements
            self._todo += [(module, one) for one in statements if name == _AT_IMPORT or not isinstance(one, Imports)]

    def _name(self, module: Module, name: str, attributes: tuple[str, ...]) -> None:
        """Follows a use of a name of a module."""
        if (module.key, name, *attributes) in self._seen:
            return
        self._seen.add((module.key, name, *attributes))
        statements = module.bindings.get(name, [])
        if statements:
            self._add(module, name, statements)
        for node in statements:
            for bound, (dotted, path) in module.targets(node) if isinstance(node, Imports) else ():
                if bound == name:
                    self._import(dotted, (*path, *attributes))
        for star in module.stars:
            other = self._modules.load(star)
            if other is not None and (other.offers(name) or other.stars):
                self._name(other, name, attributes)

    def _import(self, dotted: str, attributes: tuple[str, ...]) -> None:
        """Follows a use of a module: of an attribute, or of all there is."""
        if ("", dotted, *attributes) in self._seen:
            return
        self._seen.add(("", dotted, *attributes))
        module = self._modules.load(dotted)
        first, rest = (attributes[0], attributes[1:]) if attributes else ("", ())
        within = f"{dotted}.{first}" if first and self._modules.find(f"{dotted}.{first}") else ""
        if module is not None:
            self._execute(module)
            if not first:
                self._whole(module)
            elif module.offers(first):
                self._name(module, first, rest)
            elif not within and not (first.startswith("__") and first.endswith("__")):
                self._name(module, first, rest) if module.stars else self._whole(module)
        if within:
            self._import(within, rest)

    def _whole(self, module: Module) -> None:
        """Counts all of a module, and what it says of others."""
        for name, statements in list(module.bindings.items()):
            if all(isinstance(one, ast.Import) for one in statements):
                self._add(module, name, statements)
            else:
                self._name(module, name, ())

    def _execute(self, module: Module) -> None:
        """Counts what runs when a module is imported, and what it imports then."""
        if module.key in self._known:
            return
        self._known[module.key] = module
        packages = module.dotted.split(".")[:-1]
        self._execute_all(".".join(packages[: end + 1]) for end in range(len(packages)))
        if module.running:
            self._add(module, _AT_IMPORT, module.running)
        for statement in module.body:
            if isinstance(statement, Imports) or statement in module.running:
                self._execute_imports(module, statement)

    def _execute_imports(self, module: Module, statement: ast.stmt) -> None:
        for node in imports_in(statement):
            if isinstance(node, ast.Import):
                self._execute_all(one.name for one in node.names)
            else:
                base = module.base_of(node)
                self._execute_all([base, *(f"{base}.{one.name}" for one in node.names)])

    def _execute_all(self, names: Iterator[str] | list[str]) -> None:
        for name in names:
            module = self._modules.load(name)
            if module is not None:
                self._execute(module)

    def _statement(self, module: Module, statement: ast.stmt) -> None:
        """Follows all that a statement uses."""
        used = used_names(statement)
        local = [target for node in imports_in(statement) for target in self._targets(module, node)]
        if not isinstance(statement, Imports):
            self._execute_imports(module, statement)
        uses = set(chains(statement)) | {(name, ()) for name in used - {name for name, _ in chains(statement)}}
        for name, attributes in uses:
            for bound, (dotted, path) in local:
                if bound == name:
                    self._import(dotted, (*path, *attributes))
            if name in used:
                self._name(module, name, attributes)
        said = {name for name, _ in uses} | {one for _, attributes in uses for one in attributes}
        bare = any(_is_bare_call(node, "vars") for node in ast.walk(statement))
        if said & _NAMERS or bare or ("sys", ("modules",)) in {(name, path[:1]) for name, path in uses}:
            self._whole(module)
        if said & _IMPORTERS:
            self._import_by_text(module, statement)

    def _targets(self, module: Module, node: Imports) -> list[tuple[str, tuple[str, tuple[str, ...]]]]:
        return [] if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" else list(module.targets(node))

    def _import_by_text(self, module: Module, statement: ast.stmt) -> None:
        """Counts the modules and files that texts in a statement name; where none does, all beside it."""
        texts = {node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)}
        found = False
        for text in sorted(one for one in texts if isinstance(one, str)):
            name = text.strip(".")
            files = [one for one in (module.file.parent / text, Path(text)) if one.suffix == ".py" and one.is_file()]
            place = self._modules.find(name) if name else None
            if place is not None:
                found = True
                self._import(name, ())
                inner = python_files(place.parent) if place.name == "__init__.py" else ()
                for one in inner:
                    self._import(f"{name}.{one.stem}", ())
            elif files:
                found = True
                self.add_file(files[0])
        for file in () if found else python_files(module.file.parent):
            if not self._modules.has(file):
                self.add_file(file)

    def _entangled(self, module: Module) -> bool:
        """Counts definitions that nothing names, but that may change what is reached; says whether there were any."""
        before = len(self._units)
        hooks = any(_hooks_subclasses(node) for node in self.nodes())
        for name, statements in module.bindings.items():
            if (module.key, name) in self._units or (module is self._main and name in self._free):
                continue
            for statement in statements:
                makers = list(statement.decorator_list) if isinstance(statement, Definition) else []
                if isinstance(statement, ast.ClassDef) and hooks:
                    makers += statement.bases
                registers = any(self._is_users(module, used) for maker in makers for used, _ in chains(maker))
                if registers or self._changes_reached(module, statement):
                    self._name(module, name, ())
        return len(self._units) > before or bool(self._todo)

    def _changes_reached(self, module: Module, statement: ast.stmt) -> bool:
        """Whether an assignment calls something that is, or is given, a value that is reached: a generator, a list."""
        if not (isinstance(statement, ast.Assign | ast.AnnAssign) and calls_something(statement)):
            return False
        values = {
            name
            for name in used_names(statement)
            if (module.key, name) in self._units
            and any(isinstance(one, ast.Assign | ast.AnnAssign) for one in module.bindings[name])
        }
        return bool(values)

    def _is_users(self, module: Module, name: str) -> bool:
        """Whether a name stands for something of the user's."""
        if name in module.within or any(not isinstance(one, Imports) for one in module.bindings.get(name, [])):
            return True
        imported = [node for node in module.bindings.get(name, []) if isinstance(node, Imports)]
        targets = [target for node in imported for bound, target in module.targets(node) if bound == name]
        return any(self._modules.find(dotted) is not None for dotted, _ in targets)


def _is_bare_call(node: ast.AST, name: str) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == name and not node.args  # type: ignore[attr-defined]


def _hooks_subclasses(node: ast.AST) -> bool:
    """Whether code sees classes that are derived from another, which it need not name."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "__init_subclass__"
    if isinstance(node, ast.ClassDef):
        return any(one.arg == "metaclass" for one in node.keywords)
    return isinstance(node, ast.Attribute) and node.attr == "__subclasses__"
