"""What tokens a recipe adds to a model: which rows of its vocabulary are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SIZES = ("vocab_size", "decoder_vocab_size")
"""How configs call it; Marian's has both."""


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that a tokenizer did not know before the recipe gave them to it; ids are rows of the vocabulary.

    Attributes:
        first: the first of their ids; all below were known before.
        stop: the id behind the last.
        rows: how many rows the vocabulary of the model had; where it had room, some of theirs among them.
    """

    first: int
    stop: int
    rows: int


def vocab_size_of(config: Any) -> int | None:
    """How many rows the only vocabulary of a model has; None where there is none, or one of its encoder besides."""
    holders = _holders(config)
    size = getattr(holders[0], "vocab_size", None) if len(holders) == 1 else None
    return size if isinstance(size, int) else None


def set_vocab_size(config: Any, size: int) -> None:
    """Gives the only vocabulary of a model so many rows."""
    (holder,) = _holders(config)
    for name in _SIZES:
        if hasattr(holder, name):
            setattr(holder, name, size)


def _holders(config: Any) -> list[Any]:
    """The config, or those in it, that have a vocabulary."""
    if hasattr(config, "vocab_size"):
        return [config]
    nested = (getattr(config, name, None) for name in config.sub_configs)
    return [one for one in nested if hasattr(one, "vocab_size")]
