"""The low-rank path beside a weight's own product.

    LoRA (arXiv 2106.09685)    y = x·W + s·(x·A)·B                   A [in, r], B [r, out], s = alpha / r
    rsLoRA (arXiv 2312.03732)  the same with s = alpha / sqrt(r)
    DoRA (arXiv 2402.09353)    y = (m / |W + s·A·B|) ∘ (x·W + s·(x·A)·B)

with the norm |.| over the input of each output, through which no gradient goes. It is computed from A, B and W; the sum
W + s·A·B itself never exists. Rows of a table that are looked up are products with one-hot rows:
`W[ids] + s·A[ids]·B`.

Factors are float32 and multiplied in the type of the activation, as PEFT's are under `torch.autocast`, in which its
trainer runs bfloat16 (without autocast it computes the path in float32). Products add up in float32 either way.

It is put into a traced program, whoever wrote that: layers in a loop, experts, a plugin's own module.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from redco_cli.adapters.merging import LowRank, whole_path
from redco_cli.adapters.products import AdaptedProduct, Repeated
from redco_cli.adapters.uses import is_lookup, product_of
from redco_cli.errors import ModelError
from redco_cli.plugin.contract import ADAPTER_OFF, Params
from redco_cli.sharding.program.marks import keep_whole
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, bind, rewritten
from redco_cli.sharding.tensor_split import TensorSplit

Array = Any


@dataclass(frozen=True)
class _Adapted:
    """A weight with its adapter, not used yet.

    Attributes:
        path: of the weight.
        how: its rank and scale.
        arrays: `weight` as it is seen, `A` and `B`, `initial_A` and `initial_B` of what the path began with,
            `magnitude` of DoRA and perhaps its `ratio`, `key` of dropout; layers come first in all.
        split: the dim of the weight as it is seen that is split over `tensor`; None where there is none.
    """

    path: str
    how: LowRank
    arrays: Mapping[str, Array]
    split: TensorSplit | None = None

    @property
    def base(self) -> Array:
        """The weight without its adapter."""
        return self.arrays["weight"]

    def array(self, use: str) -> Array:
        """Refuses a use that an adapter cannot be carried through."""
        raise refused(self.path, use)

    def having(self, arrays: Mapping[str, Array]) -> _Adapted:
        """The same with other arrays."""
        return replace(self, arrays=arrays)

    def viewed(self, equation: Any) -> _Adapted:
        """The same with the weight seen in another way."""
        split = None if self.split is None else self.split.viewed(equation)
        seen = {**self.arrays, "weight": bind(equation, [self.arrays["weight"]])[0]}
        return replace(self, arrays=seen, split=split)

    def stacked(self) -> _Adapted:
        """Itself: `uses_of` has told that its layers come first."""
        return self

    def layer(self, arrays: Mapping[str, Array]) -> _Adapted:
        """One layer of it."""
        return replace(self, arrays=arrays, split=None if self.split is None else self.split.layer())


@dataclass(frozen=True)
class _Replaced:
    """A parameter that is trained itself, not used yet.

    Attributes:
        arrays: `base`, as the model began, and `whole`, as it is trained.
    """

    arrays: Mapping[str, Array]

    @property
    def base(self) -> Array:
        """As the model began."""
        return self.arrays["base"]

    def array(self, use: str = "") -> Array:
        """As it is trained."""
        return self.arrays["whole"]

    def having(self, arrays: Mapping[str, Array]) -> _Replaced:
        """The same with other arrays."""
        return _Replaced(arrays)

    layer = having

    def viewed(self, equation: Any) -> _Replaced:
        """Both, seen in another way."""
        return _Replaced({name: bind(equation, [array])[0] for name, array in self.arrays.items()})

    def stacked(self) -> _Replaced:
        """Itself."""
        return self


def refused(path: str, use: str) -> ModelError:
    """An adapter cannot follow its weight into an operation."""
    problem = f"{path} is used by {use}, which cannot carry an adapter: only products with activations and lookups can"
    remedy = "leave it out of adapter.targets; adapter.modules_to_save trains it as it is"
    return ModelError("adapter.targets", problem, remedy)


class _Adapting:
    """Adds the low-rank path to each use of an adapted weight."""

    enters = CONTROL_FLOW
    calls = frozenset[str]()
    everywhere = False

    def __init__(self) -> None:
        self._repeated: dict[int, tuple[Array, Any, Array]] = {}

    def repeated(self, split: TensorSplit, x: Array) -> Array:
        """The activation once for each device, the same array for all weights that it is multiplied with.

        So it is kept once for a backward pass, and what query, key and value add to its gradient crosses devices once.
        """
        scope = core.get_opaque_trace_state()
        known = self._repeated.get(id(x))
        if known is None or known[1] != scope:  # what was made within a loop is not known outside of it
            known = self._repeated[id(x)] = (x, scope, split.repeated(x))
        return known[2]

    def is_tracked(self, operand: Any) -> bool:
        return isinstance(operand, _Adapted | _Replaced)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name == "name" and (equation.params["name"] == ADAPTER_OFF or self.is_tracked(operands[0])):
            (one,) = operands  # a weight without an adapter stays as it is: it is gathered where it is used
            return [one.base if self.is_tracked(one) and equation.params["name"] == ADAPTER_OFF else one]
        operands = [x.array() if isinstance(x, _Replaced) else x for x in operands]
        adapted = [number for number, operand in enumerate(operands) if isinstance(operand, _Adapted)]
        if not adapted:
            return bind(equation, operands)
        weight = operands[adapted[0]]
        if name == "dot_general" and len(adapted) == 1:
            return [_multiplied(equation, weight, operands[1 - adapted[0]], adapted[0], self.repeated)]
        if is_lookup(equation) and adapted == [0]:
            return [_looked_up(equation, weight, operands[1:])]
        raise refused(weight.path, name)


def _multiplied(equation: Any, adapted: _Adapted, x: Array, position: int, repeated: Repeated) -> Array:
    """x·W with its low-rank path."""
    product, arrays, how = product_of(equation, position), adapted.arrays, adapted.how
    weight, (a, b) = arrays["weight"], whole_path(arrays)
    whole = AdaptedProduct(equation, product, weight.shape, how.scale, how.dropout, adapted.split, repeated)
    experts, inputs, outputs = map(whole.sizes, (product.experts[0], product.inputs[0], product.outputs))
    _check_fits(adapted, (*experts, math.prod(inputs)), math.prod(outputs), "a product of other dims")
    kept = _kept(x, arrays.get("key"), how.dropout)
    return whole(weight, a, b, x, kept, magnitude=arrays.get("magnitude"), ratio=arrays.get("ratio"))


def _check_fits(adapted: _Adapted, into: Sequence[int], out: int, use: str) -> None:
    """Refuses a use unlike the one that the adapter was made for."""
    if adapted.arrays["A"].shape[:-1] != tuple(into) or adapted.arrays["B"].shape[-1] != out:
        raise refused(adapted.path, use)


def _looked_up(equation: Any, adapted: _Adapted, others: Sequence[Array]) -> Array:
    """W[ids] with its low-rank path.

    Where rows are split over devices, compilers sum those of A in the launch that sums those of W: neither waits for
    the other.
    """
    weight, a, b = (adapted.arrays[name] for name in ("weight", "A", "B"))
    _check_fits(adapted, weight.shape[:1], weight.shape[1], "a lookup of rows")
    (own,) = bind(equation, [weight, *others])
    (indices,) = others
    settings = {name: equation.params[name] for name in ("dimension_numbers", "mode", "fill_value")}
    rows = jax.lax.gather(a.astype(own.dtype), indices, slice_sizes=(1, adapted.how.rank), **settings)
    return own + (adapted.how.scale * (rows @ b.astype(own.dtype))).astype(own.dtype)


def _kept(x: Array, key: Any, rate: float) -> Array | None:
    """Which elements of an activation are not dropped; None for all of them, as without a key."""
    if key is None or not rate:
        return None
    one = key.reshape(-1, key.shape[-1])[0]  # experts that are computed together have one activation
    return jax.random.bernoulli(jax.random.wrap_key_data(one), 1 - rate, x.shape)


def adapting(
    function: Callable[..., Any], adapters: Mapping[str, LowRank], splits: Mapping[str, TensorSplit] | None = None
) -> Callable[..., Any]:
    """The same function of parameters with adapters.

    Args:
        function: `function(params, *others)`, any that JAX can trace.
        adapters: path of a weight to how it is adapted; each is used as `uses_of` tells.
        splits: path of a weight to its dim that is split over `tensor`, where one is: its path has no collectives of
            its own then. The result is the same without.

    Returns:
        `adapted(params, factors, key, *others)`: `factors` has for each path `A` [*stack, in, r], `B` [*stack, r, out]
        and perhaps `initial_A`, `initial_B` (the same shapes), `magnitude` [*stack, out] and `ratio`, where that is
        known (`magnitude_ratio`); for any other path, `whole`, which takes the parameter's place. `key` is the random
        key of dropout, None where nothing is dropped.

    Raises:
        ModelError: when traced: a weight is used where its adapter cannot be carried.
    """

    def adapted(params: Params, factors: Mapping[str, Mapping[str, Array]], key: Any, *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *others)
        arguments = [
            _tracked(_path(path), leaf, adapters, factors, key, splits or {})
            for path, leaf in jax.tree.leaves_with_path(params)
        ]
        results = rewritten(closed, [*arguments, *jax.tree.leaves(others)], _Adapting())
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return adapted


def _path(keys: Any) -> str:
    return "/".join(str(key.key) for key in keys)


def _tracked(
    path: str,
    weight: Array,
    adapters: Mapping[str, LowRank],
    factors: Mapping[str, Mapping[str, Array]],
    key: Any,
    splits: Mapping[str, TensorSplit],
) -> Any:
    if path not in factors:
        return weight
    if path not in adapters:
        return _Replaced({"base": weight, "whole": factors[path]["whole"].astype(weight.dtype)})
    how, arrays = adapters[path], {"weight": weight, **factors[path]}
    ranks = {"A": -1, "initial_A": -1, "B": -2, "initial_B": -2}
    arrays |= {name: keep_whole(arrays[name], dim) for name, dim in ranks.items() if name in arrays}
    if key is not None and how.dropout:
        stack = arrays["A"].shape[:-2]
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        split = jax.random.split(own, math.prod(stack))
        arrays["key"] = jax.random.key_data(split).reshape(*stack, -1)
    return _Adapted(path, how, arrays, splits.get(path))
