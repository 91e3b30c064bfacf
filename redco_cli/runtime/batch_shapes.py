"""Batches that change their shape: told once, counted, and refused when they are too many.

A program is compiled for one set of arrays. A `collate_fn` that pads to the longest of its examples makes a new set
with nearly every batch, and then the run compiles for hours what it meant to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redco_cli.errors import PluginError
from redco_cli.runtime.peers.agreement import arrays_per_example
from redco_cli.runtime.peers.multihost import is_main_process

_REMEDY = "pad to data.max_length, or up to the next of a few fixed lengths"
_SHOWN = 4
"""Of the shapes of an array, so many are named."""


class BatchShapes:
    """The sets of arrays that batches have come in: names, shapes per example, dtypes.

    How many examples a batch holds is redco's choice, and does not count.
    """

    def __init__(self, where: str, tell: Callable[[str], None], *, dims: int = 1, limit: int | None = None) -> None:
        """No batch has come yet.

        Args:
            where: the place of `collate_fn`.
            tell: told once, on the first process, when a batch has another shape than those before.
            dims: how many of the leading dims count examples.
            limit: so many sets may come; None for any number.
        """
        self._where, self._tell, self._dims, self._limit = where, tell, dims, limit
        self._seen: list[dict[str, str]] = []
        self._lengths: set[int] = set()

    def see(self, name: str, batch: Mapping[str, Any], length: int | None = None) -> None:
        """Looks at a batch for which a program has not been compiled yet.

        Args:
            name: of the program.
            batch: arrays by name.
            length: what redco has its rows padded to; None where it does not say. Of each length one set may come
                without a word.

        Raises:
            PluginError: on all processes, when it is one set of arrays too many.
        """
        new = arrays_per_example(batch, self._dims)
        if new in self._seen:
            return
        if length is not None and length not in self._lengths:
            self._lengths.add(length)
            self._seen.append(new)
            return
        known = len(self._seen) - max(len(self._lengths) - 1, 0)
        if self._limit is not None and known == self._limit:
            problem = f"batches came in more than {self._limit} shapes, and each compiles the {name} anew"
            error = PluginError(
                self._where, f"{problem}: {self._varied(new)}", f"{_REMEDY}; or raise train.max_compilations"
            )
            error.on_all_processes = True
            raise error
        self._seen.append(new)
        if known == 1 and is_main_process():
            problem = f"the batches vary, and each new shape compiles the {name} anew"
            self._tell(f"{self._where}: {problem}: {self._varied(new)}; {_REMEDY}")

    def _varied(self, new: Mapping[str, str]) -> str:
        """Which arrays were not the same in all batches, and what they were, the latest last."""
        every, told = [*self._seen, new], []
        for key in dict.fromkeys(name for one in every for name in one):
            forms = list(dict.fromkeys(one.get(key, "missing") for one in every))
            if len(forms) > 1:
                cut = [*forms[: _SHOWN - 1], "...", forms[-1]] if len(forms) > _SHOWN else forms
                told.append(f"batch[{key!r}] was {', then '.join(cut[:2])}{''.join(f', {form}' for form in cut[2:])}")
        return "; ".join(told) + " per example"
