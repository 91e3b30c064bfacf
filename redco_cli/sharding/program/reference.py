"""Reference forms: how to read kernels that a trace cannot look into.

A fused kernel is one opaque equation in a trace: a custom call to cuDNN, a Pallas kernel. To the sharding it means what
a plain function of the same operands means, its reference form, which is traced in its place. Attention by
`jax.nn.dot_product_attention` is known already; a kernel of one's own is announced with `register_reference`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

_REFERENCES: dict[str, Callable[..., Any]] = {}
_CAUSAL: set[str] = set()


def register_reference(name: str, reference: Callable[..., Any], *, causal: bool = False) -> None:
    """Says what an opaque kernel computes.

    Args:
        name: of the primitive, of the target of an FFI call, of the Pallas kernel, or of the `jax.jit` function around
            the kernel, as `jax.make_jaxpr` prints it.
        reference: takes the operands of that equation, and returns its results, or `NotImplemented` where they are not
            those of the kernel. It is traced, never run.
        causal: the kernel is attention under a causal mask, and computes half of the scores that the reference does.

    Example:
        >>> import jax
        >>> from redco_cli.sharding import register_reference
        >>> @jax.jit
        ... def fused_mlp(x, up, down):  # a Pallas kernel, say
        ...     return x
        >>> register_reference("fused_mlp", lambda x, up, down: jax.nn.relu(x @ up) @ down)
    """
    _REFERENCES[name] = reference
    (_CAUSAL.add if causal else _CAUSAL.discard)(name)


def is_causal(equation: Any) -> bool:
    """Whether an equation is a kernel that was registered as causal attention."""
    return not _CAUSAL.isdisjoint(_names(equation))


def reference_jaxpr(equation: Any) -> Any | None:
    """The closed jaxpr of the reference form of an equation; None when none is known."""
    for name in _names(equation):
        if name in _REFERENCES:
            shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
            with contextlib.suppress(NotImplementedError):
                return jax.make_jaxpr(partial(_results, _REFERENCES[name]))(*shapes)
    if equation.primitive.name == "custom_linear_solve":
        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
        return jax.make_jaxpr(partial(_solved, equation.params))(*shapes)
    if equation.primitive.name in ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"):
        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
        return jax.make_jaxpr(partial(_cudnn_attention, equation))(*shapes)
    return None


def _results(reference: Callable[..., Any], *operands: Any) -> list[Any]:
    results = reference(*operands)
    if results is NotImplemented:
        raise NotImplementedError
    return jax.tree.leaves(results)


def _solved(params: Any, *operands: Any) -> list[Any]:
    """`jax.lax.custom_linear_solve`, forwards: by what it is given to solve with, after the products by the matrix."""
    lengths = params["const_lengths"]
    begin = lengths.matvec + lengths.vecmat
    given = operands[begin : begin + lengths.solve]
    return list(core.jaxpr_as_fun(params["jaxprs"].solve)(*given, *operands[sum(lengths) :]))


def _names(equation: Any) -> list[str]:
    params = equation.params
    about = params.get("name_and_src_info")
    found = (equation.primitive.name, params.get("name"), params.get("target_name"), getattr(about, "name", None))
    return [name for name in found if isinstance(name, str)]


def _cudnn_attention(equation: Any, query: Any, key: Any, value: Any, *others: Any) -> list[Any]:
    """Fused attention as JAX calls cuDNN, on [batch, length, heads, head_dim] or [batch, heads, length, head_dim]."""
    heads_first = equation.params["layout"] == 1  # as the enum of JAX counts
    if heads_first:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    attended = jax.nn.dot_product_attention(query, key, value, implementation="xla")
    if heads_first:
        attended = jnp.swapaxes(attended, 1, 2)
    statistics = [jnp.zeros(variable.aval.shape, variable.aval.dtype) for variable in equation.outvars[1:]]
    return [attended, *statistics]
