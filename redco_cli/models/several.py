"""Several models as one: their parameters below their names.

A recipe's `models`, or a mapping from `build_model`, makes them several. What a model of `models` does not say of
itself is as in `model`: its architecture, and the parameters to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.errors import RecipeError
from redco_cli.models.resolve import resolve_model
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection, Recipe

MAIN = "model"
"""The name of the model that `model` of a recipe means."""


@dataclass(frozen=True, eq=False)
class Models:
    """What a run trains and uses, where that is more than one model.

    Attributes:
        members: name to model; each has `abstract` parameters.
        constant: name to the type of the parameters, for those that are never updated.
        kept: name to abstract parameters, for those that are kept in another form than that of the model.
        is_named: whether a plugin finds parameters under the names of models; not where there is one and its adapter.
        config: None; each model has its own.
        task: None likewise.
    """

    members: Mapping[str, Any]
    constant: Mapping[str, str]
    is_named: bool = True
    kept: Mapping[str, Params] = field(default_factory=dict)
    config: None = None
    task: None = None

    @property
    def abstract(self) -> Params:
        """The parameters of all models: name to nested dict of `jax.ShapeDtypeStruct`."""
        return {name: self._abstract(name, model) for name, model in self.members.items()}

    def _abstract(self, name: str, model: Any) -> Params:
        if name in self.kept:
            return self.kept[name]
        if name not in self.constant:
            return model.abstract
        dtype = jnp.dtype(self.constant[name])
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model.abstract)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Regular expressions for the paths of parameters that are never updated."""
        own = [
            f"{name}/(?:{pattern})" for name, model in self.members.items() for pattern in getattr(model, "frozen", ())
        ]
        return (*own, *(f"{name}/.*" for name in self.constant))

    @property
    def stacked(self) -> dict[str, int]:
        """Path to the number of leading dims that count layers, of the parameters for which it is known."""
        return {
            f"{name}/{path}": count
            for name, model in self.members.items()
            for path, count in getattr(model, "stacked", {}).items()
        }


def members_of(model: Any) -> Mapping[str, Any]:
    """The models of a run by name: of `Models` all, of any other itself."""
    return model.members if isinstance(model, Models) else {MAIN: model}


def constant_of(model: Any) -> Mapping[str, str]:
    """Of the models that are never updated, the type of the parameters; by name."""
    return model.constant if isinstance(model, Models) else {}


def without(params: Params, names: Collection[str]) -> Params:
    """Parameters without those of some models."""
    return {name: tree for name, tree in params.items() if name not in names} if names else params


def section_of(recipe: Recipe, name: str) -> ModelSection:
    """What a recipe says of one of its models; of `model` itself, where the model's own section leaves it open."""
    if name == MAIN:
        return recipe.model
    given = recipe.models.get(name)
    if given is None:
        return ModelSection()
    own = {key: value for key, value in given.model_dump(exclude={"frozen"}).items() if value is not None}
    if "subfolder" in own and not own.keys() & {"name", "config"}:  # another model of the same pipeline
        own |= {"name": recipe.model.name, "revision": own.get("revision", recipe.model.revision)}
    if own.keys() & {"name", "config"}:  # another architecture: its weights and its head are no longer those of `model`
        return ModelSection(**{"dtype": recipe.model.dtype, **own})
    return recipe.model.model_copy(update=own)


def never_updated(recipe: Recipe) -> tuple[str, ...]:
    """The models of a recipe that are never updated: frozen ones, and the one that an adapter is trained for."""
    return (*((MAIN,) if recipe.adapter else ()), *(name for name, given in recipe.models.items() if given.frozen))


def unsaved(recipe: Recipe) -> frozenset[str]:
    """The models that are in no checkpoint: never updated, and with weights or a run that their parameters are from.

    The one that an adapter is trained for is in none whatever it is from: see `keeps_base`.
    """
    names = never_updated(recipe)
    return frozenset(name for name in names if name == MAIN or (one := section_of(recipe, name)).params or one.name)


def keeps_base(recipe: Recipe) -> bool:
    """Whether a run keeps the model that its adapter is trained for: random numbers, or those of a run, which may
    delete them.
    """
    return recipe.adapter is not None and (recipe.model.params is not None or recipe.model.name is None)


def assembled(recipe: Recipe, built: Any, where: Callable[[str], str]) -> Any:
    """All models of a recipe as one; where there is only one, that.

    Args:
        recipe: with its `models`.
        built: the model that `model` means, or from `build_model`: one, or several by name.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: a model has no architecture, or two.
        ModelError: as `resolve_model`.
    """
    members = dict(built) if isinstance(built, Mapping) else {MAIN: built}
    if not recipe.models and not isinstance(built, Mapping):
        return built
    for name, given in recipe.models.items():
        section = section_of(recipe, name)
        if name in members:
            if given.name is not None or given.config is not None:
                problem = "has an architecture of its own here, but build_model returns one of that name"
                raise RecipeError(where(f"models.{name}"), problem, "leave out name and config, or take another name")
            continue
        if section.name is None and section.config is None and section.subfolder is None:
            if MAIN not in members:
                problem = f"has neither name nor config, and build_model returns {', '.join(members)}"
                raise RecipeError(where(f"models.{name}"), problem, "give it one, or let build_model return it too")
            members[name] = members[MAIN]
            continue
        remat = "none" if given.frozen else recipe.train.remat
        members[name] = resolve_model(section, where=place_of_model(name, where), remat=remat)
    return Models(members, {name: section_of(recipe, name).dtype for name, one in recipe.models.items() if one.frozen})


def place_of_model(name: str, where: Callable[[str], str]) -> Callable[[str], str]:
    """The place of keys such as `model.name` for one of several models: `models.teacher.name`."""
    if name == MAIN:
        return where
    return lambda key: where(f"models.{name}{key.removeprefix(MAIN)}" if key.split(".")[0] == MAIN else key)
