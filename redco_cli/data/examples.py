"""What examples are, whoever made them: a sequence of dicts, or an iterable of them when there is no known length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast, overload

from redco_cli.errors import DataError, PluginError

Example = Mapping[str, Any]
Examples = Sequence[Example] | Iterable[Example]
"""With `len` and `[int]`, or only an `__iter__` that starts afresh each time."""

_NONE = object()
_REMEDY = "return a list of dicts, or any object with __len__ and __getitem__, or with __iter__, that gives dicts"


class Indexed(Sequence[Example]):
    """Examples of known length that are read by their number; of several at once, `__getitems__` says how."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return self.__getitems__(range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.one(index % len(self))

    @abstractmethod
    def one(self, index: int) -> Example:
        """The example of a number from 0, one of those that there are."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> list[Example]: ...


def is_indexed(examples: Examples) -> TypeGuard[Sequence[Example]]:
    """Whether the examples have a known length and can be read in any order."""
    return hasattr(examples, "__len__") and hasattr(examples, "__getitem__")


def evenly_spread(count: int, most: int) -> list[int]:
    """Numbers of a sample of examples, the first and the last among them, ascending; all where they are few.

    >>> evenly_spread(9, 3)
    [0, 4, 8]
    """
    return sorted({round(number * (count - 1) / max(min(count, most) - 1, 1)) for number in range(min(count, most))})


def check_examples(examples: Any, where: str) -> Examples:
    """Proves that `examples`, which may come from a plugin's `load_examples`, can be read; looks at the first one only.

    An iterator, such as what a function with `yield` returns, can be read only once, which is too little for epochs and
    shuffling: it is copied to a list. What is too large for that needs `__iter__` to start afresh.
    Objects with `__getitem__` are read from several threads at once.

    Args:
        examples: a sequence, iterable or iterator of mappings.
        where: what made them, for errors.

    Returns:
        The same, or the list.

    Raises:
        PluginError: it is neither, or the first example is no mapping.
        DataError: there are none.
    """
    kind = type(examples).__name__
    if isinstance(examples, Mapping | str | bytes):
        raise PluginError(where, f"an object of type {kind} is no sequence of examples", _REMEDY)
    if isinstance(examples, Iterator):
        examples = list(examples)
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        first = _first_of_sequence(examples, where) if len(examples) else _NONE
    elif isinstance(examples, Iterable):
        first = next(iter(examples), _NONE)
    else:
        raise PluginError(where, f"an object of type {kind} is no sequence of examples", _REMEDY)
    if first is _NONE:
        raise DataError(where, "holds no examples", "check what the data is made from")
    if not isinstance(first, Mapping):
        raise PluginError(where, f"the first example is of type {type(first).__name__}, not a dict", _REMEDY)
    return cast("Examples", examples)


def _first_of_sequence(examples: Any, where: str) -> Any:
    try:
        return examples[0]
    except LookupError as error:
        problem = f"[0] of a {type(examples).__name__} raised {type(error).__name__}({error})"
        raise PluginError(where, problem, _REMEDY) from error
