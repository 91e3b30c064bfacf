"""What a chat template may spend on one conversation: its time, and the size of all that it makes.

A value is weighed when it is made: a text by its characters, a list by its elements and theirs, as often as they are
in it. So no comparison, hash, sorting or printing of it can take long, whatever the list shares with itself.
"""

from __future__ import annotations

import itertools
import re
import string
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any, NoReturn

from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Joiner, Namespace

from redco_cli.errors import DataError

SECONDS = 10.0
"""Processor time for one conversation; templates that are used take milliseconds."""
LONGEST = 2**24
"""Characters that a text, or a list with all that is in it, may have: four million tokens and more."""
ELEMENTS = 2**20
"""Elements of one list: each takes many times the memory of a character."""
PRODUCED = 2**30
"""Bytes of all texts and lists that are made on the way, a character as one."""
_BITS = 4096
"""Of a whole number: those that templates count with have few."""
_COMPARED = 2**31
"""Characters that a search may compare which looks at the whole of one text for each place of another."""
_NUMBER = 320
"""Characters that a fraction may take when it is formatted without a width."""
_PERCENT = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+)?)?[hlL]?(.)", re.DOTALL)
"""One conversion of `text % values`: its width, its precision and its letter."""
_HOLDERS = (Namespace, LoopContext, Cycler, Joiner)
"""What can be given a heavy value after it was weighed."""
_CONTAINERS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class Budget:
    """What is left for one conversation.

    Args:
        where: the place in the recipe of what brought the template.
        name: what the template came with.
    """

    def __init__(self, where: str, name: str) -> None:
        self._where, self._name = where, name
        self._until, self._produced = time.thread_time() + SECONDS, 0
        self._weights: dict[int, tuple[Any, int]] = {}  # with the value, so that its id stays its own

    def check(self, produced: int = 0) -> None:
        """Counts what was made, and looks at the clock."""
        self._produced += produced
        if time.thread_time() > self._until:
            self.refuse(f"takes more than {SECONDS:g} s for one conversation")
        if self._produced > PRODUCED:
            self.refuse(f"makes more than {PRODUCED:,} characters on its way")

    def refuse(self, problem: str) -> NoReturn:
        """Raises the DataError that names the template."""
        remedy = "correct it (chat_template.jinja or tokenizer_config.json), or name another model.tokenizer"
        raise DataError(self._where, f"the chat template of {self._name} {problem}", remedy)

    def allow(self, size: int, limit: int = LONGEST, unit: str = "characters or elements") -> None:
        """Refuses to make a value of this size if that is beyond the limit."""
        if size > limit:
            self.refuse(f"makes a value of more than {limit:,} {unit}")

    def allow_number(self, value: Any) -> None:
        """Refuses whole numbers whose products and quotients would take long."""
        if isinstance(value, int):
            self.allow(value.bit_length(), _BITS, "bits")

    def allow_product(self, left: int, right: int, *, power: bool = False) -> None:
        """Refuses a product or power that is too large, before it is made."""
        bits = left.bit_length() * right if power else left.bit_length() + right.bit_length()
        self.allow(bits, _BITS, "bits")

    def allow_search(self, text: str, sought: Any) -> None:
        """Refuses a search whose time grows with the product of both lengths."""
        if isinstance(sought, str) and len(text) * len(sought) > _COMPARED:
            self.refuse(f"searches a text of {len(text):,} characters for one of {len(sought):,}")

    def allow_replace(self, text: str, old: Any, new: Any, count: Any = None) -> None:
        """Refuses a replacement that would make the text too long."""
        if isinstance(old, str) and isinstance(new, str):
            found = text.count(old)
            times = min(found, count) if isinstance(count, int) and count >= 0 else found
            self.allow(len(text) + times * len(new))

    def allow_percent(self, text: str, values: Any) -> None:
        """Refuses `text % values` if its widths, or its values as often as they may be named, are too much."""
        size, fields = len(text), 0
        for width, precision, letter in _PERCENT.findall(text):
            if letter == "(":  # a name with brackets in it, which would hide a width
                self._refuse_width()
            size += self._width(width) + self._width(precision) + _NUMBER * (letter in "eEfFgG")
            fields += letter != "%"
        self.allow(size + self.weigh(values) * (1 if isinstance(values, tuple) else fields))

    def allow_braces(self, text: str, values: Iterable[Any]) -> None:
        """Refuses `text.format(values)` for the same reasons."""
        size, fields = len(text), 0
        for _, field, spec, _ in string.Formatter().parse(text):
            if field is None:
                continue
            if "{" in (spec or ""):
                self._refuse_width()
            size += sum(map(self._width, re.findall(r"\d+", spec or ""))) + _NUMBER * bool(spec)
            fields += 1
        self.allow(size + fields * sum(map(self._weigh_part, values)))

    def _width(self, digits: str) -> int:
        if digits == "*" or len(digits) > 8:
            self._refuse_width()
        return int(digits or 0)

    def _refuse_width(self) -> NoReturn:
        self.refuse("formats text to a width that is not bounded")

    def weigh(self, value: Any) -> int:
        """Characters and elements of a value, about as many as its text has."""
        if isinstance(value, str):
            return 1 + len(value)
        if isinstance(value, int):
            return 1 + value.bit_length() // 3
        if isinstance(value, bytes):
            return 1 + 4 * len(value)
        if isinstance(value, MethodType):
            return 1 + self.weigh(value.__self__)
        if not isinstance(value, _CONTAINERS):
            return 1
        if id(value) not in self._weights:
            self.allow(len(value), ELEMENTS, "elements")
            parts = itertools.chain(value, value.values()) if isinstance(value, Mapping) else value
            self._weights[id(value)] = (value, 1 + sum(map(self._weigh_part, parts)))
            self.check()
        return self._weights[id(value)][1]

    def _weigh_part(self, value: Any) -> int:
        if isinstance(value, _HOLDERS):
            self.refuse(f"keeps a {type(value).__name__.strip('_').lower()} in a list, where it cannot be weighed")
        return self.weigh(value)

    def made(self, value: Any) -> Any:
        """The same value, which was made just now, unless it is too large."""
        if isinstance(value, _CONTAINERS):
            self.allow(self.weigh(value))
        self.allow_number(value)
        return self.copied(value)

    def copied(self, value: Any) -> Any:
        """The same value, which is a part of one that was weighed."""
        produced = 0
        if isinstance(value, str | bytes):
            produced = len(value)
            self.allow(produced)
        elif isinstance(value, _CONTAINERS):
            produced = 8 * len(value)  # a pointer for each element
        self.check(produced)
        return value

    def measured(self, pieces: Iterable[Any], between: int = 0) -> Iterator[Any]:
        """The same pieces, until they are too much in one value with so many characters between them."""
        total = 0
        for piece in pieces:
            total += between + self._weigh_part(piece)
            self.allow(total)
            self.check()
            yield piece
