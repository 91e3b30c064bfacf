"""From a recipe file to a `Recipe`: `extends`, environment, overrides, and where every value came from.

Precedence, later wins: default < `extends` < the recipe < environment (`REDCO_TRAIN__STEPS=10`) < command line
(`train.steps=10`). Mappings merge key by key, also the free ones; anything else is replaced whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from redco_cli.errors import RecipeError, UsageError
from redco_cli.recipe.explain import accepts_only_text, did_you_mean, explain, refuse_written_consent
from redco_cli.recipe.redaction import key_among, parse_value, shown_override
from redco_cli.recipe.schema import Recipe
from redco_cli.recipe.shipped import find_recipe
from redco_cli.recipe.yaml12 import dump_yaml, parse_yaml

ENVIRONMENT_PREFIX = "REDCO_"
RESOLVED_NAME = "recipe.resolved.yaml"
LENGTH_IN_STEPS = re.compile(r"^# train\.steps: .* (\d+) optimizer steps$", re.MULTILINE)
"""The line of a resolved recipe that says what a length in epochs comes to."""
_REMARK = re.compile(r"""  # (command line|environment \w+|[^"']+:\d+)$""")
_ASIDE = "x-"
"""How the top-level keys begin that are no part of a recipe, but a place for anchors."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its history.

    Attributes:
        recipe: the typed values.
        path: the file it was read from.
        origins: dotted key to the place that gave it (`recipes/x.yaml:14`, `environment REDCO_SEED`, `command line`);
            keys left at their default are not in it.
    """

    recipe: Recipe
    path: Path
    origins: Mapping[str, str]

    def where(self, key: str) -> str:
        """The place of the dotted `key` for an error: `recipes/x.yaml:14: train.steps`."""
        return place(key, self.origins, str(self.path))

    @property
    def directory(self) -> Path:
        """The folder that relative paths in the recipe start from, before the working directory."""
        return self.path.parent


def load_recipe(
    name: str | os.PathLike[str], overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedRecipe:
    """Reads, merges and checks a recipe.

    Args:
        name: a file, or the name of a shipped recipe (`quickstart`).
        overrides: `dotted.key=value` strings, values in YAML.
        environ: environment variables; those that start with `REDCO_` override: `REDCO_SEED`, `REDCO_TRAIN__STEPS`.

    Raises:
        UsageError: no such recipe, or an override that is no `key=value`.
        RecipeError: the recipe is wrong; all mistakes are reported at once.
    """
    path = find_recipe(name)
    values, origins = _read(path, ())
    for key, value, origin in (
        *_from_environment(os.environ if environ is None else environ, values),
        *_from_overrides(overrides),
    ):
        _assign(values, origins, key, value, origin)
    try:
        recipe = Recipe.model_validate(values, context={"directory": path.parent})
    except ValidationError as error:
        raise RecipeError.of(explain(error, lambda key: place(key, origins, shown(path)))) from None
    refuse_written_consent(origins)
    return LoadedRecipe(recipe, Path(shown(path)), origins)


def find_run(name: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """The recipe of a run given by its output directory, with that directory; or a recipe as `find_recipe` finds it.

    Raises:
        UsageError: there is none.
    """
    directory = Path(name)
    if not os.path.isdir(directory):
        return find_recipe(name), None
    resolved = directory / RESOLVED_NAME
    if not resolved.is_file():
        raise UsageError(str(name), f"is no run: it has no {RESOLVED_NAME}", "name an output directory or a recipe")
    return resolved, directory


def load_run(
    name: str | os.PathLike[str], overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedRecipe:
    """The recipe of a run that is continued, given by its output directory; or a recipe as `load_recipe` loads it.

    The run stays where it is, whatever the working directory, and `checkpoint.resume: never` is taken for `auto`: it
    was for the run that began.

    Raises:
        UsageError: there is none, or `output_dir` is given besides the directory.
        RecipeError: the recipe is wrong.
    """
    if not os.path.isfile(Path(name) / RESOLVED_NAME):
        return load_recipe(name, overrides, environ)
    path, directory = Path(name) / RESOLVED_NAME, Path(name)
    for override in overrides:
        if override.partition("=")[0] == "output_dir":
            remedy = f"leave output_dir out, or begin another run: redco train {shown(path)} {override}"
            raise UsageError("command line: output_dir", f"the run in {shown(directory)} continues there", remedy)
    loaded = load_recipe(path, overrides, environ)
    stays = (
        [] if Path(loaded.recipe.output_dir).resolve() == directory.resolve() else [f"output_dir={shown(directory)}"]
    )
    begins = [] if loaded.recipe.checkpoint.resume != "never" else ["checkpoint.resume=auto"]
    return load_recipe(path, [*overrides, *stays, *begins], environ) if stays or begins else loaded


def place(key: str, origins: Mapping[str, str], fallback: str) -> str:
    """`<where the key or its nearest given parent was written>: <key>`."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        origin = origins.get(".".join(parts[:end]))
        if origin:
            return f"{origin}: {key}"
    return f"{fallback}: {key}" if key else fallback


def shown(path: Path) -> str:
    """A path as a person would write it: relative when it lies below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)


def resolved_yaml(loaded: LoadedRecipe, steps: int | None = None) -> str:
    """The whole recipe with every default, each line with the origin of its value; loads to the same recipe.

    Args:
        loaded: the recipe.
        steps: what `train.steps` comes to, noted where it is given in another unit.
    """
    first, remarks = _remarks(loaded.path)
    lines = [first or f"# resolved from {loaded.path}; values without a remark are defaults"]
    if steps is not None and loaded.recipe.train.steps.unit != "steps":
        lines.append(f"# train.steps: {loaded.recipe.train.steps} are {steps} optimizer steps")
    text = dump_yaml(loaded.recipe.model_dump(mode="json"))
    positions = {line: key for key, line in parse_yaml(text, RESOLVED_NAME).lines.items()}
    for number, line in enumerate(text.splitlines(), start=1):
        origin = loaded.origins.get(positions.get(number, ""), "")
        origin = remarks.get(origin, origin)
        lines.append(f"{line}  # {origin}" if origin and not line.endswith(":") else line)
    return "\n".join(lines) + "\n"


def _remarks(path: Path) -> tuple[str, dict[str, str]]:
    """The first line of a resolved recipe, and the place of each of its lines to the origin that is noted there.

    So that a run which is continued from its directory still says where its values came from.
    """
    if path.name != RESOLVED_NAME or not path.is_file():
        return "", {}
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {f"{path}:{number}": _REMARK.search(line) for number, line in enumerate(lines, start=1)}
    return lines[0], {origin: "" if match is None else match[1] for origin, match in found.items()}


def _read(path: Path, parents: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of one file merged over what it extends, with their origins."""
    name = shown(path)
    if path.resolve() in parents:
        raise RecipeError(f"{name}: extends", "the recipes extend each other in a circle", "remove one `extends`")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            name, f"cannot be read: {error}", "check the path, its permissions and that it is UTF-8"
        ) from None
    document = parse_yaml(text, name)
    if not isinstance(document.data, dict):
        found = "nothing" if document.data is None else type(document.data).__name__
        raise RecipeError(name, f"a recipe is a mapping, but this file holds {found}", "start from `redco init`")
    values = {key: value for key, value in document.data.items() if not key.startswith(_ASIDE)}
    base = values.pop("extends", None)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if base is not None:
        merged, origins = _read(
            _base_path(base, path, f"{name}:{document.lines['extends']}: extends"), (*parents, path.resolve())
        )
    for key, value in values.items():
        _merge(merged, origins, key, value, lambda dotted: f"{name}:{document.lines[dotted]}")
    return merged, origins


def _base_path(base: object, path: Path, where: str) -> Path:
    if not isinstance(base, str):
        raise RecipeError(where, f"{base!r} given, but one path or shipped name is expected", "extend one recipe")
    beside = path.parent / base
    try:
        return beside if os.path.isfile(beside) else find_recipe(base)
    except UsageError as error:
        raise RecipeError(where, f"{base}: {error.problems[0].problem}", error.problems[0].remedy) from None


def _merge(target: Any, origins: dict[str, str], key: Any, value: Any, origin: Any, prefix: str = "") -> None:
    dotted = f"{prefix}{key}"
    inner = target.get(key) if isinstance(target, dict) else target[key]
    if isinstance(value, dict) and isinstance(inner, dict):
        for name, inner in value.items():
            _merge(target[key], origins, name, inner, origin, f"{dotted}.")
        return
    target[key] = value
    for stale in [known for known in origins if known == dotted or known.startswith(f"{dotted}.")]:
        del origins[stale]
    for inner in _paths(value, dotted):
        origins[inner] = origin(inner)


def _paths(value: Any, dotted: str) -> Iterator[str]:
    yield dotted
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _paths(inner, f"{dotted}.{name}")


def _assign(values: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    """Sets one dotted key, making the mappings above it as needed; a number names an item of a list that is there.

    Raises:
        RecipeError: the list has no such item.
    """
    target: Any = values
    names, prefix = key.split("."), ""
    while True:
        name: Any = names.pop(0)
        if isinstance(target, list):
            name = _number(name, target, f"{origin}: {key}", prefix)
        inner = target.get(name) if isinstance(target, dict) else target[name]
        if not names or not isinstance(inner, dict | list):
            break
        target, prefix = inner, f"{prefix}{name}."
    for part in reversed(names):
        value = {part: value}
    _merge(target, origins, name, value, lambda _dotted: origin, prefix)


def _number(name: str, items: Sequence[Any], where: str, prefix: str) -> int:
    if name.isdecimal() and int(name) < len(items):
        return int(name)
    listed, last = prefix.removesuffix("."), len(items) - 1
    remedy = f"its items are 0 to {last}; or give all: {listed}=[...]"
    raise RecipeError(where, f"{listed} is a list of {len(items)}, and {name} is no item of it", remedy)


def _from_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            where = f"command line: {shown_override(override)}"
            raise UsageError(where, "is no override", "write key=value, such as train.steps=100")
        yield key, _typed(key, text, f"command line: {key}"), "command line"


def _from_environment(environ: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for variable in sorted(environ):
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in RESERVED_VARIABLES:
            continue
        origin = f"environment {variable}"
        top = key.partition(".")[0]
        if top not in Recipe.model_fields:
            raise RecipeError(origin, f"{top} is no key of a recipe", did_you_mean(top, sorted(Recipe.model_fields)))
        key = key_among(key, values, origin)
        yield key, _typed(key, environ[variable], origin), origin


RESERVED_VARIABLES = frozenset(
    map("REDCO_{}".format, ("CACHE", "COORDINATOR", "INSECURE", "NUM_PROCESSES", "PROCESS_ID", "SECRET", "TIMEOUT"))
)
"""Variables with the prefix that are no recipe keys: where compiled programs are cached, and the processes of a run."""


def _typed(key: str, text: str, where: str) -> Any:
    if accepts_only_text(key):
        return None if text == "null" else text
    return parse_value(key, text, where)
