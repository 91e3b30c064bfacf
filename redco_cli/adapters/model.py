"""The adapter of a model as one more model of the run: which weights it adapts, and its own parameters.

Which weights there are is read from the model's own program over made-up inputs, so that training, prediction and
export adapt the same ones.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.adapters.merging import LowRank, magnitude_ratio, merged, path_norms
from redco_cli.adapters.principal import principal_factors, refuse_no_parts
from redco_cli.adapters.uses import Use, uses_of
from redco_cli.errors import RecipeError
from redco_cli.models.example_inputs import example_inputs
from redco_cli.plugin.contract import Params
from redco_cli.recipe.explain import matching_paths
from redco_cli.recipe.sections.adapter import AdapterSection
from redco_cli.sharding.program.reading import read

ADAPTER = "adapter"
"""The name of the adapter among the models of a run."""
_ROWS = 2
_NAMED = 5


@dataclass(frozen=True, eq=False)
class Adapter:
    """What is trained of a model that is not updated itself.

    Attributes:
        section: the recipe's.
        base: abstract parameters of the model.
        uses: path of an adapted weight to how the model uses it.
        adapters: the same paths to rank and scale.
        saved: paths of parameters that are trained themselves.
        layers: path of a parameter of the model to how many of its leading dims count layers, where that is known.
        linear: where the base is quantised, path of each weight that `all_linear` means to how the model uses it.
        config: None; the model has one.
        task: None likewise.
    """

    section: AdapterSection
    base: Params = field(repr=False)
    uses: Mapping[str, Use] = field(repr=False)
    adapters: Mapping[str, LowRank]
    saved: tuple[str, ...]
    layers: Mapping[str, int] = field(default_factory=dict, repr=False)
    linear: Mapping[str, Use] = field(default_factory=dict, repr=False)
    config: None = None
    task: None = None

    @property
    def frozen(self) -> tuple[str, ...]:
        """Regular expressions for the paths of its parameters that are not trained: what its path began with."""
        return (".*/initial_[AB]",) if self.section.begins_with_weight else ()

    @cached_property
    def abstract(self) -> Params:
        """Its parameters as a nested dict of `jax.ShapeDtypeStruct`, below the path of what they adapt."""
        return jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))

    @property
    def stacked(self) -> dict[str, int]:
        """Path to the number of leading dims that count layers or experts."""
        factors = {
            path: len(self.uses[path.rpartition("/")[0]].stack)
            for path in flatten_dict(self.abstract, sep="/")
            if path.rpartition("/")[0] in self.uses
        }
        return factors | {f"{path}/whole": self.layers[path] for path in self.saved if path in self.layers}

    def init(self, rng: Any) -> Params:
        """Parameters with which a model computes what it computes without, once `begun` has seen it. Traceable.

        A of a product is drawn as `torch.nn.Linear` is, which PEFT keeps; where rows are looked up, B is drawn instead.
        Layers are drawn each for itself.
        """
        flat: dict[str, Any] = {}
        for path, how in self.adapters.items():
            use, key = self.uses[path], jax.random.fold_in(rng, zlib.crc32(path.encode()))
            down, up = (*use.stack, use.inputs, how.rank), (*use.stack, how.rank, use.outputs)
            if use.kind == "product":
                bound = 1 / math.sqrt(use.inputs)
                flat[f"{path}/A"] = jax.random.uniform(key, down, jnp.float32, -bound, bound)
                flat[f"{path}/B"] = jnp.zeros(up)
            else:
                flat[f"{path}/A"], flat[f"{path}/B"] = jnp.zeros(down), jax.random.normal(key, up)
            if self.section.begins_with_weight:
                flat[f"{path}/initial_A"], flat[f"{path}/initial_B"] = jnp.zeros(down), jnp.zeros(up)
            if self.section.type == "dora":
                flat[f"{path}/magnitude"] = jnp.zeros((*use.stack, use.outputs))
        known = flatten_dict(self.base, sep="/")
        flat |= {f"{path}/whole": jnp.zeros(known[path].shape) for path in self.saved}
        return unflatten_dict(flat, sep="/")

    def begun(self, base: Params, own: Params) -> Params:
        """What `init` returned, with what only the model's parameters tell.

        That is principal parts of the weights, magnitudes, and what is trained itself.
        """
        weights, flat = flatten_dict(base, sep="/"), flatten_dict(own, sep="/")
        if self.section.begins_with_weight:
            for path, how in self.adapters.items():
                find = partial(principal_factors, scale=how.scale, iterations=self.section.iterations)
                a, b = self.uses[path].by_layer(find, weights[path], flat[f"{path}/A"])
                flat |= {f"{path}/A": a, f"{path}/initial_A": a, f"{path}/B": b, f"{path}/initial_B": b}
        for name in flat:
            path, _, kind = name.rpartition("/")
            if kind == "whole":
                flat[name] = weights[path].astype(jnp.float32)
            elif kind == "magnitude":
                factors = {part: flat[f"{path}/{part}"] for part in self.parts}
                norms = partial(path_norms, scale=self.adapters[path].scale)
                flat[name] = self.uses[path].by_layer(norms, weights[path], factors)
        return unflatten_dict(flat, sep="/")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the factors of a weight."""
        return ("A", "B", "initial_A", "initial_B") if self.section.begins_with_weight else ("A", "B")

    def factors(self, own: Params) -> dict[str, dict[str, Any]]:
        """Its parameters by the path of what they adapt."""
        found: dict[str, dict[str, Any]] = {}
        for name, leaf in flatten_dict(own, sep="/").items():
            path, _, kind = name.rpartition("/")
            found.setdefault(path, {})[kind] = leaf
        return found

    def prepared(self, base: Params, factors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The same factors with what DoRA computes of weights and factors, for a program that repeats them. Traceable.

        Layer by layer, as the program itself would: all weights are never in float32 at a time.
        """
        weights, found = flatten_dict(base, sep="/"), {path: dict(one) for path, one in factors.items()}
        for path, one in found.items():
            if "magnitude" in one:
                ratio = partial(magnitude_ratio, scale=self.adapters[path].scale)
                one["ratio"] = self.uses[path].by_layer(ratio, weights[path], one)
        return found

    def merged(self, base: Params, own: Params) -> Params:
        """Parameters with which the model alone computes what it computes with its adapter. Traceable."""
        weights = dict(flatten_dict(base, sep="/"))
        for path, factors in self.factors(own).items():
            if path in self.adapters:
                weights[path] = merged(weights[path], factors, self.adapters[path], self.uses[path])
            else:
                weights[path] = factors["whole"].astype(weights[path].dtype)
        return unflatten_dict(weights, sep="/")


def model_uses(model: Any) -> dict[str, list[Use | str]]:
    """How a model uses its parameters, as `uses_of`; told by made-up inputs."""
    return uses_of(partial(_called, model), model.abstract, *_inputs(model))


def _called(model: Any, params: Params, inputs: Any, kept: Any) -> list[Any]:
    """What a model makes of inputs; of a module that keeps more than parameters, with what it keeps."""
    return jax.tree.leaves(model(params, **inputs, **kept))


def _inputs(model: Any) -> tuple[Any, Any]:
    inputs = example_inputs(model, _ROWS)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in inputs.items()}
    return shapes, jax.eval_shape(model.init_variables) if getattr(model, "collections", ()) else {}


def adapter_of(model: Any, section: AdapterSection, where: Callable[[str], str]) -> Adapter:
    """The adapter that a recipe asks for.

    Args:
        model: a named model, or a plugin's own.
        section: the recipe's.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: a pattern matches nothing, or what cannot carry an adapter.
    """
    found = model_uses(model)
    known = list(flatten_dict(model.abstract, sep="/"))
    all_linear = not isinstance(section.targets, tuple)
    linear = _linear(model, found, known) if all_linear or section.quantize else {}
    chosen = list(linear) if all_linear else _matching(section.targets, known, where("adapter.targets"))
    saved = _matching(section.modules_to_save, known, where("adapter.modules_to_save"))
    chosen = [path for path in chosen if path not in saved]
    if not chosen and not saved:
        problem = "the model has no weight that is multiplied with activations and followed by another"
        raise RecipeError(where("adapter.targets"), problem, f"name some: {_some(known)}")
    uses = {path: _one_use(path, found.get(path, []), section, where) for path in chosen}
    ranks = dict.fromkeys(chosen, section.rank)
    ranks |= _by_path(section.rank_pattern, chosen, where("adapter.rank_pattern"))
    if section.begins_with_weight:
        refuse_no_parts(uses, ranks, where)
    alphas = _by_path(section.alpha_pattern, chosen, where("adapter.alpha_pattern"))
    adapters = {}
    for path in chosen:
        rank = ranks[path]
        alpha = alphas.get(path, 2 * section.rank if section.alpha is None else section.alpha)
        scale = alpha / math.sqrt(rank) if section.rslora else alpha / rank
        adapters[path] = LowRank(rank, scale, section.dropout)
    left = {path: use for path, use in linear.items() if section.quantize and path not in saved}
    return Adapter(section, model.abstract, uses, adapters, tuple(saved), getattr(model, "stacked", {}), left)


def _linear(model: Any, found: Mapping[str, Sequence[Use | str]], known: Sequence[str]) -> dict[str, Use]:
    """Every weight that is multiplied with activations, always in the same way, and followed by another."""
    reading = read(partial(_called, model), model.abstract, *_inputs(model))
    last = reading.output_axes | reading.experts

    def is_followed(path: str) -> bool:
        made = {axis for matmul in reading.matmuls.get(path, ()) for dim in matmul.produced for axis in dim}
        return not made & last

    linear = {}
    for path in known:
        uses = [use for use in found.get(path, ()) if isinstance(use, Use) and use.kind == "product"]
        always = bool(uses) and len(uses) == len(found[path]) and len({use.signature for use in uses}) == 1
        if always and is_followed(path):
            linear[path] = uses[0]
    return linear


def _one_use(path: str, uses: Sequence[Use | str], section: AdapterSection, where: Callable[[str], str]) -> Use:
    """How a weight is used, where that is always the same way and one that can carry an adapter."""
    strange = [use for use in uses if isinstance(use, str)]
    several = {use.signature: use for use in uses if isinstance(use, Use)}
    remedy = "leave it out of adapter.targets; adapter.modules_to_save trains it as it is"
    if not uses:
        raise RecipeError(where("adapter.targets"), f"{path} is not used by the model", "leave it out")
    if strange:
        problem = f"{path} is used by {strange[0]}: only products with activations and lookups can carry an adapter"
        raise RecipeError(where("adapter.targets"), problem, remedy)
    if len(several) > 1:
        kinds = " and ".join(sorted(f"a {use.kind} of {use.inputs} to {use.outputs}" for use in several.values()))
        problem = f"{path} is used in several ways ({kinds}), and an adapter fits one"
        raise RecipeError(where("adapter.targets"), problem, remedy)
    use = next(use for use in uses if isinstance(use, Use))
    if use.kind == "lookup" and section.type == "dora":
        problem = f"{path} is a table of which rows are looked up, which DoRA does not know"
        raise RecipeError(where("adapter.targets"), problem, f"{remedy}; or set adapter.type: lora")
    return use


def _matching(patterns: Sequence[str], known: Sequence[str], where: str) -> list[str]:
    def meant(pattern: str) -> str:
        close = any(re.search(pattern, path) for path in known)
        return f"did you mean .*{pattern}.*? it must match whole paths" if close else f"paths are {_some(known)}"

    return matching_paths(patterns, known, where, meant)


def _by_path(patterns: Mapping[str, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    """What a mapping of patterns says of each path; of several, the last counts."""
    return {path: value for pattern, value in patterns.items() for path in _matching([pattern], known, where)}


def _some(known: Sequence[str]) -> str:
    return f"{', '.join(known[:_NAMED])}{', ...' if len(known) > _NAMED else ''}"
