"""Several models as one: their parameters below their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.plugin.contract import Params

MAIN = "model"
"""The name of the model that `model` of a recipe means."""


@dataclass(frozen=True, eq=False)
class Models:
    """What a run trains and uses, where that is more than one model.

    Attributes:
        members: name to model; each has `abstract` parameters.
        constant: name to the type of the parameters, for those that are never updated.
        config: None; each model has its own.
        task: None likewise.
    """

    members: Mapping[str, Any]
    constant: Mapping[str, str]
    config: None = None
    task: None = None

    @property
    def abstract(self) -> Params:
        """The parameters of all models: name to nested dict of `jax.ShapeDtypeStruct`."""
        return {name: self._abstract(name, model) for name, model in self.members.items()}

    def _abstract(self, name: str, model: Any) -> Params:
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
