"""Numbers that plugin code draws with Python's or numpy's generators while it is traced: refused, with their line.

They would be drawn once and become constants of the compiled program, and others after a stop or on another process.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from redco_cli.errors import PluginError
from redco_cli.plugin.importing import is_installed
from redco_cli.plugin.load import LoadedPlugin

_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)
_OTHERS = tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_paths()["stdlib"], Path(__file__).parents[2]))
"""Where Python's own modules and those of this package are."""
_PROBLEM = "draws numbers while the function is traced: they are drawn once, and the same in every step"
_REMEDY = (
    "draw with jax.random and the rng that the function is given; or in collate_fn, which is called for each batch, "
    "with a generator that is seeded by the example and ctx.step"
)


@contextlib.contextmanager
def undrawn(plugin: LoadedPlugin) -> Iterator[None]:
    """While functions of a plugin are traced, the numbers that its own code draws without JAX are refused.

    Refused are the functions of `random` and `numpy.random`, a generator that is made without a seed, and those that
    the plugin's module holds. What libraries draw passes: a layer may be left out at random.

    Raises:
        PluginError: where a number is drawn.
    """
    thread = threading.get_ident()

    def refuse(what: str) -> None:
        caller = sys._getframe(2)
        file = caller.f_code.co_filename
        if threading.get_ident() == thread and _is_of_user(file):
            place = plugin.file if os.path.realpath(file) == os.path.realpath(plugin.file) else os.path.relpath(file)
            raise PluginError(f"{place}:{caller.f_lineno}: {caller.f_code.co_name}", f"{what} {_PROBLEM}", _REMEDY)

    own = getattr(plugin.loss_fn, "__globals__", {})
    held = {name: one for name, one in own.items() if isinstance(one, _GENERATORS)}
    with (
        _replaced(vars(random), _drawing(random, refuse)),
        _replaced(vars(np.random), _drawing(np.random, refuse) | {"default_rng": _seeded(refuse)}),
        _replaced(own, {name: _Held(name, one, refuse) for name, one in held.items()}),
    ):
        yield


def _drawing(module: ModuleType, refuse: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """What stands for the functions of a module that draw from its own generator."""
    functions = {name: getattr(module, name) for name in module.__all__}
    return {
        name: _refusing(f"{module.__name__}.{name}", one, refuse)
        for name, one in functions.items()
        if isinstance(getattr(one, "__self__", None), _GENERATORS)
    }


def _refusing(what: str, function: Callable[..., Any], refuse: Callable[[str], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse(what)
        return function(*args, **kwargs)

    return call


def _seeded(refuse: Callable[[str], None]) -> Callable[..., np.random.Generator]:
    make = np.random.default_rng

    def default_rng(seed: Any = None) -> np.random.Generator:
        if seed is None:
            refuse("numpy.random.default_rng() has no seed, and")
        return make(seed)

    return default_rng


class _Held:
    """Stands for a generator that a module holds."""

    def __init__(self, name: str, generator: Any, refuse: Callable[[str], None]) -> None:
        self._name, self._generator, self._refuse = name, generator, refuse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._generator, name)
        return _refusing(f"{self._name}.{name}", found, self._refuse) if callable(found) else found


@contextlib.contextmanager
def _replaced(names: dict[str, Any], others: dict[str, Any]) -> Iterator[None]:
    before = {name: names[name] for name in others}
    names.update(others)
    try:
        yield
    finally:
        names.update(before)


def _is_of_user(file: str) -> bool:
    return not (is_installed(file) or file.startswith(_OTHERS))
