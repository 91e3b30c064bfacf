"""A plugin's own Flax module behind the same interface as the named models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from redco_cli.errors import MissingKeyError, ModelError, PluginError
from redco_cli.plugin.contract import Context, Loss, Params
from redco_cli.plugin.guard import guarded, place_in, with_remedy
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.plugin.parts import next_token_loss

_SWITCHES = ("train", "deterministic")


@dataclass(frozen=True, eq=False)
class ModuleModel:
    """A `flax.linen.Module` from `build_model`. Made by `module_model`.

    Attributes:
        module: the module.
        where: the place for errors.
        abstract: the parameters as a nested dict of `jax.ShapeDtypeStruct`.
        seed: of its first variables that are no parameters.
        collections: names of those, such as `batch_stats`.
        example: name to abstract array: the inputs that `init` applies the module to.
        config: None; named models have one.
        task: None likewise.
        frozen: empty: everything may be trained.
        kept: collection to nested dict of numpy arrays: what a trained module keeps besides its parameters; a call that
            is given none uses these. Empty while it is trained, when they are in the plugin's state.
    """

    module: Any
    where: str
    example: Mapping[str, Any] = field(repr=False)
    abstract: Params = field(repr=False)
    seed: int = 0
    collections: tuple[str, ...] = ()
    config: None = None
    task: None = None
    frozen: tuple[str, ...] = ()
    kept: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def init(self, rng: Any) -> Params:
        """Fresh parameters from a key. Traceable: call it under `jit` to have them born sharded."""
        return _init(self.module, self.example, rng)

    def init_variables(self) -> dict[str, Any]:
        """The first variables that are no parameters, by collection: `{"batch_stats": ...}`. Traceable."""
        found = _variables(self.module, self.example, jax.random.key(self.seed))
        return {name: collection for name, collection in found.items() if name != "params"}

    def places_in(self, state: Any, name: str) -> dict[str, tuple[str, ...]]:
        """Where in a plugin's state the collections of this module are: under their name, with the shapes of its own.

        Args:
            state: nested dicts of anything with a shape.
            name: of this model; of several places, those below it count.

        Returns:
            Collection to path.

        Raises:
            ModelError: one is not there, or in several places.
        """
        wanted = jax.eval_shape(self.init_variables)
        return {one: self._place_in(state, one, _shapes(wanted[one]), name) for one in self.collections}

    def _place_in(self, state: Any, collection: str, shapes: Any, name: str) -> tuple[str, ...]:
        found = [path for path, tree in _subtrees(state) if path[-1] == collection and _shapes(tree) == shapes]
        found = [path for path in found if name in path] or found
        if len(found) != 1:
            at = f"has it at {' and '.join(map('/'.join, found))}" if found else "does not have it under that name"
            problem = f"the module is nothing without its {collection}, and the plugin's state {at}"
            raise ModelError(self.where, problem, f"keep it in one place of the state: ...{name}/{collection}")
        return found[0]

    def __call__(
        self,
        params: Params,
        *inputs: Any,
        rng: Any = None,
        train: bool = False,
        variables: Mapping[str, Any] | None = None,
        mutable: Any = False,
        **named: Any,
    ) -> Any:
        """Applies the module; `train` or `deterministic` is passed where its `__call__` has such a parameter.

        Args:
            params: as `init` returns them.
            inputs: what its `__call__` takes; `named` likewise by name.
            rng: key for dropout.
            train: whether dropout is active.
            variables: by collection, what the module keeps besides parameters; as `init_variables` returns them.
                Default: `kept`.
            mutable: which of these collections are updated; as for `flax.linen.Module.apply`.

        Returns:
            What the module returns; with `mutable` a pair of it and the updated collections.

        Raises:
            ModelError: dropout is active and `rng` is missing.
        """
        rngs = {} if rng is None else {"dropout": rng}
        try:
            kept = jax.tree.map(jnp.asarray, self.kept)  # numpy arrays cannot be indexed by what is traced
            given = {**kept, **(variables or {}), "params": params}
            switches = _switches(self.module, train)
            return self.module.apply(given, *inputs, **named, **switches, rngs=rngs, mutable=mutable)
        except flax.errors.InvalidRngError:
            raise MissingKeyError(
                self.where, "training this module needs a key for dropout", "pass rng= to ctx.model, as loss_fn got it"
            ) from None

    def __getattr__(self, name: str) -> Any:
        """Nothing: a name that is no attribute, such as a method of the module, is told with how that is called."""
        error = AttributeError(f"ctx.model has no attribute {name!r}", name=name, obj=self)
        module = self.__dict__.get("module")
        if name == "apply":
            raise with_remedy(error, "call it: ctx.model(params, x), with train= and rng= for dropout")
        if callable(getattr(type(module), name, None)) and not name.startswith("_"):
            raise with_remedy(error, f'call that method of the module as ctx.model(params, ..., method="{name}")')
        raise error

    def next_token_loss(self, params: Params, *inputs: Any, labels: Any, weights: Any = None, **named: Any) -> Loss:
        """The loss of predicting each token from those before it, where a call gives logits [B, L, V].

        Labels and weights [B, L] are aligned with the input; the other arguments are those of a call.
        """
        return next_token_loss(self(params, *inputs, **named), labels, weights)

    def decoder_inputs(self, labels: Any) -> Any:
        """A module of one's own has no start token that redco knows of.

        Raises:
            ModelError: always.
        """
        raise ModelError(self.where, "a module from build_model has no decoder_inputs", "shift the labels in loss_fn")

    def generate(
        self, params: Params, inputs: Any, attention_mask: Any = None, *, rng: Any = None, **settings: Any
    ) -> Any:
        """Refuses: a module of one's own does not generate.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            self.where,
            f"{type(self.module).__name__} comes from build_model and does not generate",
            "write the decoding loop in predict_fn",
        )


def own_model(plugin: LoadedPlugin, ctx: Context, batch: Mapping[str, Any]) -> ModuleModel | dict[str, ModuleModel]:
    """The model, or the models by name, that `build_model` of a plugin gives, for batches like this one.

    Args:
        plugin: it has a `build_model`.
        ctx: what that is told.
        batch: as for `module_model`.

    Raises:
        PluginError: `build_model` raised, or what it returned does not fit.
    """
    where, seed, keeps = f"{plugin.file}: build_model", ctx.recipe.seed, plugin.init_state is not None
    assert plugin.build_model is not None
    with guarded(where, "build_model", plugin.file):
        built = plugin.build_model(ctx)
        modules = dict(built) if isinstance(built, Mapping) else {"model": built}
        for name, module in modules.items():
            if not isinstance(module, nn.Module) or not (isinstance(name, str) and name.isidentifier()):
                problem = f"returned {built!r:.60}, which is no flax.linen.Module, nor a dict of such by name"
                raise PluginError(where, problem, "return an instance of one: return Net(...)")
        found = {
            name: module_model(module, batch, where, seed=seed, keeps_state=keeps) for name, module in modules.items()
        }
        if not found:
            raise PluginError(where, "returned no module", "return an instance of one: return Net(...)")
        return found if isinstance(built, Mapping) else found["model"]


def module_model(
    module: Any, example_batch: Mapping[str, Any], where: str, *, seed: int = 0, keeps_state: bool = False
) -> ModuleModel:
    """The model for a plugin's Flax module; allocates no parameters.

    Args:
        module: a `flax.linen.Module`.
        example_batch: name to array, abstract or not, as `collate_fn` makes them. The module is initialised with those
            parameters of its `__call__` that have no default, looked up here by name.
        where: place for errors, such as `plugins/p.py: build_model`.
        seed: of its first variables that are no parameters.
        keeps_state: whether the plugin keeps such variables.

    Raises:
        PluginError: the module takes an input that the batch lacks, has variables other than parameters that nobody
            keeps, or raises.
    """
    example = _init_inputs(module, example_batch, where)
    try:
        variables = jax.eval_shape(lambda rng: _variables(module, example, rng), jax.random.key(0))
    except (TypeError, ValueError, flax.errors.FlaxError) as error:
        shapes = {name: list(value.shape) for name, value in example.items()}
        raise PluginError(
            place_in(where.partition(":")[0], error) or where,
            f"{type(module).__name__} cannot be applied to {shapes}: {' '.join(str(error).split())}",
            "make the arrays of init_batch, or of a batch of collate_fn, fit the module",
        ) from error
    others = sorted(set(variables) - {"params"})
    if others and not keeps_state:
        raise PluginError(
            where,
            f"{type(module).__name__} keeps variables in {', '.join(others)} besides its params",
            "keep them: define init_state(ctx, params) that returns ctx.model.init_variables(), and update_state;"
            " or use layers without state, such as GroupNorm or LayerNorm instead of BatchNorm",
        )
    abstract = variables.get("params", {})
    return ModuleModel(module, where, example, abstract, seed=seed, collections=tuple(others))


def _init_inputs(module: Any, batch: Mapping[str, Any], where: str) -> dict[str, jax.ShapeDtypeStruct]:
    parameters = inspect.signature(type(module).__call__).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    names = [name for name in needed if name not in ("self", *_SWITCHES)]
    missing = [name for name in names if name not in batch]
    if missing:
        raise PluginError(
            where,
            f"{type(module).__name__}.__call__ takes {missing[0]}, but the batch has {', '.join(batch)}",
            "give the parameters of __call__ the names that collate_fn gives its arrays, or define init_batch",
        )
    return {name: jax.ShapeDtypeStruct(jnp.shape(batch[name]), batch[name].dtype) for name in names}


def _variables(module: Any, example: Mapping[str, Any], rng: Any) -> Any:
    inputs = {name: jnp.zeros(value.shape, value.dtype) for name, value in example.items()}
    return module.init({"params": rng, "dropout": rng}, **inputs, **_switches(module, train=False))


def _init(module: Any, example: Mapping[str, Any], rng: Any) -> Params:
    return _variables(module, example, rng).get("params", {})


def _switches(module: Any, train: bool) -> dict[str, bool]:
    parameters = inspect.signature(type(module).__call__).parameters
    return {name: train if name == "train" else not train for name in _SWITCHES if name in parameters}


def _shapes(tree: Any) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in flatten_dict(tree).items()} if isinstance(tree, Mapping) else {}


def _subtrees(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, inner in tree.items() if isinstance(tree, Mapping) else ():
        yield (*path, key), inner
        yield from _subtrees(inner, (*path, key))
