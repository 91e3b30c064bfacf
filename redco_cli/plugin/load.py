"""Finds a plugin and reads its functions: a built-in name, a file, or a dotted module."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from redco_cli.errors import PluginError, Problem, RecipeError
from redco_cli.plugin.guard import guarded
from redco_cli.plugin.importing import importing_from
from redco_cli.plugin.parts import generate, stack_rows
from redco_cli.recipe.explain import did_you_mean
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.recipe.redaction import given_again, hidden, remember, shown_value
from redco_cli.recipe.schema import PluginSection, TrainSection
from redco_cli.recipe.shipped import shipped_plugins

REQUIRED = {
    "collate_fn": ("ctx", "examples"),
    "loss_fn": ("ctx", "params", "batch", "rng", "train"),
    "predict_fn": ("ctx", "params", "batch", "rng"),
}
OPTIONAL = {
    "encode_fn": ("ctx", "example"),
    "prepare_fn": ("ctx", "params", "batch"),
    "output_fn": ("ctx", "outputs"),
    "metric_fn": ("ctx", "examples", "predictions"),
    "load_examples": ("ctx", "split"),
    "build_model": ("ctx",),
    "init_batch": ("ctx",),
    "optimizer_fn": ("ctx", "schedule"),
    "init_state": ("ctx", "params"),
    "update_state": ("ctx", "state", "params", "stats"),
    "run_fn": ("run",),
}

_MISSPELT = 0.85
"""How alike, of 1, two names are of which one is taken for the other."""
_GIVEN: dict[str, Callable[..., Any]] = {"collate_fn": stack_rows, "predict_fn": generate}
"""What a plugin with an `encode_fn` need not have."""


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin whose functions exist and take the arguments of the contract.

    Attributes:
        name: as the recipe names it.
        file: its source file, for errors.
        options: what plugin functions get as `ctx.options`.
        whole_batch: its loss sees a global batch as a whole, which is never cut into micro-batches.

    The functions are those of `plugin/contract.py`; an optional one that the plugin lacks is None.
    """

    name: str
    file: str
    options: Any
    collate_fn: Callable[..., Any]
    loss_fn: Callable[..., Any]
    predict_fn: Callable[..., Any]
    encode_fn: Callable[..., Any] | None = None
    prepare_fn: Callable[..., Any] | None = None
    output_fn: Callable[..., Any] | None = None
    metric_fn: Callable[..., Any] | None = None
    load_examples: Callable[..., Any] | None = None
    build_model: Callable[..., Any] | None = None
    init_batch: Callable[..., Any] | None = None
    optimizer_fn: Callable[..., Any] | None = None
    init_state: Callable[..., Any] | None = None
    update_state: Callable[..., Any] | None = None
    run_fn: Callable[..., Any] | None = None
    whole_batch: bool = False


def with_secrets(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the secrets of its plugin, which no recipe that redco writes has, from the environment.

    Raises:
        RecipeError: one of them is not there; the plugin would take what stands for it for the value.
    """
    plugin = loaded.recipe.plugin
    options = given_again(plugin.options, os.environ, loaded.where)
    remember(options, hidden(options))
    recipe = loaded.recipe.model_copy(update={"plugin": plugin.model_copy(update={"options": options})})
    return dataclasses.replace(loaded, recipe=recipe)


def load_plugin(section: PluginSection, directory: Path, where: Callable[[str], str]) -> LoadedPlugin:
    """Imports the plugin of a recipe and checks its functions' signatures and its options.

    Args:
        section: the recipe's `plugin`.
        directory: where relative files are searched first; then the working directory.
        where: dotted recipe key to its place.

    Raises:
        PluginError: not found, fails to import, lacks a function, a function takes other arguments, the options do not
            fit the plugin's `Options`, or `whole_batch` is neither True nor False.
    """
    module = _import(section.module, directory, where("plugin.module"))
    file = _relative(getattr(module, "__file__", None) or section.module)
    functions = _functions(module, file)
    whole_batch = getattr(module, "whole_batch", False)
    if not isinstance(whole_batch, bool):
        problem = f"whole_batch is {whole_batch!r:.60}, neither True nor False"
        raise PluginError(file, problem, "say whole_batch = True where loss_fn needs the batch as a whole")
    options = _options(module, section.options, file, where)
    return LoadedPlugin(section.module, file, options, **functions, whole_batch=whole_batch)


def refuse_to_cut(plugin: LoadedPlugin, train: TrainSection, where: Callable[[str], str]) -> None:
    """Refuses micro-batches of a plugin whose loss sees a global batch as a whole.

    Raises:
        RecipeError: `train.micro_batch_size` is smaller than the global batch.
    """
    micro, whole = train.micro_batch_size, train.global_batch_size
    if plugin.whole_batch and micro not in ("auto", whole):
        problem = f"{micro} would cut the global batch of {whole}, but {plugin.file} says whole_batch = True"
        remedy = "leave it out; what saves memory then is train.remat: full, more devices, or a smaller global batch"
        raise RecipeError(where("train.micro_batch_size"), problem, remedy)


def _import(name: str, directory: Path, where: str) -> types.ModuleType:
    builtins = shipped_plugins()
    if name in builtins:
        return _import_file(builtins[name], where)
    if name.endswith(".py"):
        candidates = [directory / name, Path(name)]
        for path in candidates:
            if os.path.isfile(path):
                return _import_file(path.resolve(), where)
        looked = " and ".join(dict.fromkeys(str(path) for path in candidates))
        raise PluginError(where, f"no such plugin file: looked for {looked}", "correct the path")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with guarded(where, "importing the plugin", f"{name.partition('.')[0]}/__init__.py"):
        found = _find(name)
    if found is None:
        raise PluginError(
            where, f"{name} is neither a built-in plugin nor a module", did_you_mean(name, list(builtins))
        )
    with guarded(where, "importing the plugin", _relative(found.origin or name)):
        return importlib.import_module(name)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """The module of that name, which imports the packages around it; None where there is none."""
    if not all(name.split(".")):  # `..relative`, or no name at all
        return None
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _import_file(path: Path, where: str) -> types.ModuleType:
    name = f"redco_plugin_{path.stem}"
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickled functions look their module up by name
    with importing_from(path.parent), guarded(where, "importing the plugin", _relative(str(path))):
        loader.exec_module(module)
    return module


class _FromSource(importlib.machinery.SourceFileLoader):
    """Takes no bytecode, and leaves none.

    Python takes what it once compiled for an edit of the same second and length, and leaves a part on a full disk.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _functions(module: types.ModuleType, file: str) -> dict[str, Callable[..., Any]]:
    problems: list[Problem] = []
    functions: dict[str, Callable[..., Any]] = {}
    for name, arguments in (REQUIRED | OPTIONAL).items():
        function = getattr(module, name, None)
        if function is None and name in _GIVEN and hasattr(module, "encode_fn"):
            functions[name] = _GIVEN[name]
            continue
        if function is None:
            if name in REQUIRED:
                similar = [
                    known for known in vars(module) if known.endswith("_fn") and known not in REQUIRED | OPTIONAL
                ]
                hint = f"; the plugin has {', '.join(similar)}" if similar else ""
                problems.append(Problem(file, f"has no {name}{hint}", f"define {name}({', '.join(arguments)})"))
            continue
        problem = _signature_problem(function, arguments)
        if problem:
            problems.append(Problem(_place(function, name, file), problem, f"write {name}({', '.join(arguments)})"))
        functions[name] = function
    problems += _misspelt(module, file)
    if "update_state" in functions and "init_state" not in functions:
        problems.append(Problem(file, "has update_state, but no init_state", "define init_state(ctx, params)"))
    if problems:
        raise PluginError.of(problems)
    return functions


def _misspelt(module: types.ModuleType, file: str) -> Iterator[Problem]:
    """Functions of the module that redco does not call, with names like those that it would."""
    missing = [name for name in OPTIONAL if not hasattr(module, name)]
    for name, one in vars(module).items():
        is_own = isinstance(one, types.FunctionType) and one.__module__ == module.__name__
        if is_own and (close := difflib.get_close_matches(name, missing, n=1, cutoff=_MISSPELT)):
            problem = "is no function that redco calls, though its name is nearly one"
            yield Problem(_place(one, name, file), problem, f"call it {close[0]}, or otherwise")


def _signature_problem(function: Any, arguments: tuple[str, ...]) -> str:
    if not callable(function):
        return f"is {type(function).__name__}, not a function"
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell
        return ""
    wrong = any(own != name and own in arguments for name, own in zip(arguments, signature.parameters, strict=False))
    try:
        signature.bind(*arguments)
    except TypeError:
        wrong = True
    return f"takes {signature}, but is called with ({', '.join(arguments)})" if wrong else ""


def _place(function: Any, name: str, file: str) -> str:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{file}:{code.co_firstlineno}: {name}" if code else f"{file}: {name}"


def _options(module: types.ModuleType, given: Mapping[str, Any], file: str, where: Callable[[str], str]) -> Any:
    options = getattr(module, "Options", None)
    if options is None:
        return types.MappingProxyType(dict(given))
    place = f"{file}: Options"
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise PluginError(place, "is no dataclass", "decorate it with @dataclass(frozen=True)")
    closed = pydantic.ConfigDict(extra="forbid", strict=True)
    with guarded(place, "Options", file):
        frozen = options.__dataclass_params__.frozen  # type: ignore[attr-defined]  # a subclass must agree with its base
        checker = pydantic.TypeAdapter(pydantic.dataclasses.dataclass(options, config=closed, frozen=frozen))
        try:
            checked = checker.validate_json(json.dumps(given))  # as JSON, where a list may become a tuple
        except pydantic.ValidationError as error:
            known = [field.name for field in dataclasses.fields(options)]
            raise PluginError.of([_option_problem(one, known, file, where) for one in error.errors()]) from None
        return options(
            **{field.name: getattr(checked, field.name) for field in dataclasses.fields(options) if field.init}
        )


def _option_problem(detail: Any, known: list[str], file: str, where: Callable[[str], str]) -> Problem:
    path = [str(part) for part in detail["loc"]]
    place, own = where(".".join(("plugin.options", *path))), len(path) == 1
    declared = f"see Options in {file}"
    if detail["type"] == "unexpected_keyword_argument":
        return Problem(place, "the plugin has no such option", did_you_mean(path[-1], known) if own else declared)
    if detail["type"] in ("missing", "missing_argument"):
        return Problem(place, "the plugin needs this option", f"add it; {declared}")
    if detail["type"] == "value_error":
        return Problem(place, f"{detail['ctx']['error']}", declared)
    return Problem(
        place, f"{shown_value('.'.join(('plugin.options', *path)), detail['input'])!r} given: {detail['msg']}", declared
    )


def _relative(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
