"""A compiled function that says when it compiles, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import jax

from redco_cli.chips.compiler import OUT_OF_MEMORY, Value, compile_fitting, for_jax
from redco_cli.errors import DeviceError
from redco_cli.runtime.batch_shapes import BatchShapes
from redco_cli.sharding.compiled.hlo import parse

Announce = Callable[[str], AbstractContextManager[Any]]
"""Called with what is being compiled; the compilation happens inside the context."""


class Program:
    """Compiles a function once per set of arrays in its last argument, and calls it.

    Only the last argument, the batch, may change its shapes from call to call: looking at it alone keeps the cost of a
    call independent of the size of the model.

    Attributes:
        lengths: of rows, as far as it was told of them, for which it is compiled.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        announce: Announce,
        *,
        shapes: BatchShapes | None = None,
        donate: tuple[int, ...] = (),
        options: Mapping[str, Value] = MappingProxyType({}),
        warn: Callable[[str], None] = lambda _: None,
        **jit: Any,
    ) -> None:
        """Nothing is compiled yet.

        Args:
            name: what it is, such as `train step`.
            function: a pure function of arrays.
            announce: told of each compilation.
            shapes: looks at each batch that needs a compilation, a mapping by name; None where all are alike.
            donate: arguments whose memory the result may take over.
            options: of the compiler, see `chips.compiler`.
            warn: told of options that had to be changed.
            jit: further arguments of `jax.jit`, such as `out_shardings`.
        """
        self.name = name
        self._announce, self._shapes = announce, shapes
        self._options, self._warn = options, warn
        self._jit = jax.jit(function, donate_argnums=donate, **jit)
        self._compiled: dict[Any, Any] = {}
        self.lengths: set[int] = set()

    @property
    def compilations(self) -> int:
        """For how many sets of arrays it is compiled."""
        return len(self._compiled)

    def sources(self) -> dict[str, str]:
        """Of each instruction of what was compiled, where in the function it is from, as JAX recorded it."""
        found: dict[str, str] = {}
        for compiled in self._compiled.values():
            for instructions in parse(compiled.as_text() or "").computations.values():
                found |= {one.name: one.source.partition("/")[2] for one in instructions.values() if one.source}
        return found

    def __call__(self, *arguments: Any, length: int | None = None) -> Any:
        """The function's result; does not wait for the devices.

        Args:
            arguments: of the function.
            length: what redco has the rows of the batch padded to, where it says so.

        Raises:
            DeviceError: the devices have too little memory.
            PluginError: the batches come in too many shapes.
        """
        compiled = self.compiled(*arguments, length=length)
        try:
            return compiled(*arguments)
        except jax.errors.JaxRuntimeError as error:
            raise out_of_memory(error, self.name) from error

    def compiled(self, *arguments: Any, length: int | None = None) -> Any:
        """The program for such arguments, compiled now unless it was before.

        Args:
            arguments: of the function; those of the batch may be abstract, with shardings.
            length: see a call.

        Raises:
            DeviceError, PluginError: see a call.
        """
        leaves, structure = jax.tree.flatten(arguments[-1])
        key = structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if key not in self._compiled:
            if self._shapes is not None:
                self._shapes.see(self.name, arguments[-1], length)
            shapes = ", ".join(sorted({f"{list(leaf.shape)}" for leaf in leaves}))
            try:
                with self._announce(f"{self.name} for batches of {shapes}"):
                    lowered = self._jit.lower(*arguments)
                    self._compiled[key], self._options, changed = compile_fitting(
                        lambda tried: lowered.compile(compiler_options=for_jax(tried)), self._options
                    )
            except jax.errors.JaxRuntimeError as error:
                raise out_of_memory(error, self.name) from error
            if changed is not None:
                self._warn(f"{self.name} for batches of {shapes}: compiled with {changed}")
        if length is not None:
            self.lengths.add(length)
        return self._compiled[key]


def out_of_memory(error: Exception, doing: str) -> Exception:
    """The error to raise for what the runtime reported: a `DeviceError` where memory ran out, else as it was."""
    if OUT_OF_MEMORY not in str(error):
        return error
    remedy = "lower train.micro_batch_size or data.max_length, set model.dtype: bfloat16 or train.remat: full"
    return DeviceError(doing, f"the device has too little memory: {str(error).splitlines()[0]}", remedy)
