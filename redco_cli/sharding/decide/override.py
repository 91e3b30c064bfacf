"""What the user decides about some parameters, instead of the rules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from redco_cli.errors import RecipeError
from redco_cli.sharding.decide.placed import Layout
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import AXES, DATA, FSDP, DimShardings, as_dims

Override = tuple[str, Sequence[str | Sequence[str] | None]]
"""A regular expression that is searched for in paths, and for each dim of what it finds the mesh axes to split it."""


def overridden(
    parameters: Sequence[Parameter],
    overrides: Sequence[Override],
    sizes: Mapping[str, int],
    where: Callable[[str], str],
) -> dict[str, Layout]:
    """Path to layout, for each parameter that an override matches; of several, the last counts.

    Args:
        parameters: of the program.
        overrides: in the order of the recipe.
        sizes: of the mesh axes.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: no regular expression, one that matches nothing, or axes that do not fit a parameter.
    """
    found: dict[str, Layout] = {}
    for index, (pattern, axes) in enumerate(overrides):
        place = where(f"sharding.override.{index}")
        try:
            expression = re.compile(pattern)
        except re.error as error:
            problem = f"{pattern!r} is no regular expression: {error}"
            raise RecipeError(f"{place}.path", problem, "escape special characters with a backslash") from error
        matched = [parameter for parameter in parameters if expression.search(parameter.path)]
        if not matched:
            problem = f"{pattern!r} matches no parameter"
            raise RecipeError(f"{place}.path", problem, _meant(expression, parameters))
        for parameter in matched:
            stored = _dims(parameter, axes, sizes, f"{place}.axes")
            gathered = tuple(tuple(axis for axis in dim if axis != FSDP) for dim in stored)
            found[parameter.path] = Layout(stored, gathered, f"override {pattern}")
    return found


def _meant(expression: re.Pattern[str], parameters: Sequence[Parameter]) -> str:
    """A pattern may lack what paths begin with, such as the name of one of several models."""
    for parameter in parameters:
        name, _, rest = parameter.path.partition("/")
        if expression.search(rest):
            return f"did you mean ^{name}/{expression.pattern.removeprefix('^')}? paths begin so"
    return f"redco inspect-sharding lists them; the first is {parameters[0].path}"


def _dims(
    parameter: Parameter, axes: Sequence[str | Sequence[str] | None], sizes: Mapping[str, int], place: str
) -> DimShardings:
    shape = list(parameter.shape)
    if len(axes) > len(shape):
        problem = f"{len(axes)} entries for {parameter.path}, which has the {len(shape)} dims {shape}"
        raise RecipeError(place, problem, "give one entry for each dim")
    dims = as_dims(axes, len(shape))
    named = [axis for dim in dims for axis in dim]
    for axis in named:
        if axis not in AXES or axis == DATA:
            raise RecipeError(place, f"{axis!r} does not split parameters", "the axes are fsdp and tensor")
        if named.count(axis) > 1:
            raise RecipeError(place, f"{axis} is used twice for {parameter.path}", "use each axis once")
    for size, dim in zip(shape, dims, strict=True):
        ways = math.prod(sizes[axis] for axis in dim)
        if size % ways:
            problem = f"a dim of {size} of {parameter.path} cannot be split into {ways} equal parts"
            raise RecipeError(place, problem, "split another dim, or leave this one whole: null")
    return dims
