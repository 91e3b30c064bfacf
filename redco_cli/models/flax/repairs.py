"""The few calls in transformers' Flax modules that today's JAX no longer knows, and settings that they misname.

`jnp.clip(x, a_max=...)` (T5, mT5, LongT5) is spelled `max=` since JAX 0.6, and `jnp.cat` (BLOOM with a head count that
is no power of two) never existed. Each such module gets a `jnp` of its own that still knows the call; JAX itself and
every other module stay as they are.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import jax.numpy as jnp

_MODULES = tuple(f"transformers.models.{name}.modeling_flax_{name}" for name in ("t5", "longt5", "bloom"))


class _RepairedNumpy(types.ModuleType):
    """`jax.numpy` with the two old calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: Any, *bounds: Any, a_max: Any = None, **named: Any) -> Any:
        return jnp.clip(x, *bounds, **(named if a_max is None else {"max": a_max, **named}))

    @staticmethod
    def cat(arrays: Any, axis: int = 0) -> Any:
        return jnp.concatenate(arrays, axis=axis)


def as_the_class_reads(config: Any) -> Any:
    """The same config, with the settings that its Flax class asks for under other names than PyTorch's."""
    if config.model_type == "gemma" and config.hidden_activation is None:
        config.hidden_activation = config.hidden_act
    decoder = getattr(config, "decoder", None)
    if decoder is not None and not hasattr(decoder, "initializer_range"):  # of a projection to its size
        decoder.initializer_range = decoder.init_std
    return config


def repair_loaded_modules() -> None:
    """Repairs those of the affected modules that are imported. Does nothing where JAX knows both calls."""
    if hasattr(jnp, "cat") and "a_max" in inspect.signature(jnp.clip).parameters:
        return
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and module.__dict__["jnp"] is jnp:
            module.__dict__["jnp"] = _RepairedNumpy("jax.numpy")
