"""Stop strings: texts whose appearance ends an output, found token by token.

As `StopStringCriteria` in PyTorch's transformers: an output ends with the token that completes a stop string. The
string may begin in the tokens before it, those of the prompt too, and need not end where the token ends. There each
token is compared with every place of every string; here the strings are one automaton ("Efficient string matching",
Aho and Corasick, 1975), and a table says where each token leads from each of its states.

Shapes: R rows, V tokens of the vocabulary, Q states, C characters of the stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.errors import ModelError

Array = Any
_BEFORE = "abcdef"
"""Text before each token while its own is looked up: some tokenizers drop a space at the beginning of a text."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stops:
    """Stop strings as an automaton over tokens.

    Attributes:
        after: the state that each token leads to [V, Q].
        found: whether a stop string is completed on the way [V, Q].
        window: zeros, as many as tokens of a prompt may have a part in a stop string.
    """

    after: Array
    found: Array
    window: Array

    def step(self, states: Array, tokens: Array) -> tuple[Array, Array]:
        """States after `tokens`, and whether these complete a stop string; all of the same shape."""
        known = jnp.clip(tokens, 0, self.after.shape[0] - 1)
        real = (tokens >= 0) & (tokens < self.after.shape[0])
        after, found = jnp.asarray(self.after)[known, states], jnp.asarray(self.found)[known, states]
        return jnp.where(real, after, 0), real & found

    def read(self, prompts: Array) -> Array:
        """States [R] after prompts [R, P], of which the end alone counts."""
        tail = prompts[:, -self.window.shape[0] :]
        states = jnp.zeros(prompts.shape[0], jnp.int32)
        return jax.lax.scan(lambda state, token: (self.step(state, token)[0], None), states, tail.T)[0]


def stops_of(strings: tuple[str, ...], tokenizer: Any, where: str) -> Stops | None:
    """The automaton of stop strings for a tokenizer; None where there are no strings.

    Raises:
        ModelError: there is no tokenizer, or one that does not say what its tokens are.
    """
    if not strings:
        return None
    if tokenizer is None:
        problem = f"stop_strings: {list(strings)} need the tokenizer, which says what each token adds to a text"
        raise ModelError(where, problem, "pass tokenizer=ctx.tokenizer to ctx.model.generate")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # that of a processor
    try:
        return _automaton(strings, tokenizer)
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"stop_strings need the text of each token, which {type(tokenizer).__name__} does not give: {error}"
        raise ModelError(where, problem, "leave stop_strings out, or take another tokenizer") from None


@lru_cache(maxsize=8)
def _automaton(strings: tuple[str, ...], tokenizer: Any) -> Stops:
    texts = token_texts(tokenizer)
    if not hasattr(tokenizer, "get_vocab"):  # the byte tokenizer: bytes as the characters of the same number
        strings = tuple(string.encode().decode("latin-1") for string in strings)
    moves, ends = _moves(strings)
    alphabet = {character: index for index, character in enumerate(dict.fromkeys("".join(strings)), start=1)}
    longest = max(map(len, texts))
    codes = np.zeros((len(texts), longest), np.int32)
    for token, text in enumerate(texts):
        codes[token, : len(text)] = [alphabet.get(character, 0) for character in text]
    lengths = np.array([len(text) for text in texts])
    after = np.tile(np.arange(len(ends), dtype=np.int32), (len(texts), 1))
    found = np.zeros(after.shape, bool)
    for place in range(longest):
        still = np.flatnonzero(lengths > place)
        after[still] = moves[after[still], codes[still, place, None]]
        found[still] |= ends[after[still]]
    return Stops(after, found, np.zeros(max(map(len, strings)), np.int8))


def token_texts(tokenizer: Any) -> list[str]:
    """What each token adds to a text, by its id; the byte tokenizer's as characters of the same number."""
    if not hasattr(tokenizer, "get_vocab"):
        return [chr(index) if index < 256 else "" for index in range(tokenizer.vocab_size)]
    vocabulary = tokenizer.get_vocab()
    before = tokenizer.convert_ids_to_tokens(tokenizer(_BEFORE, add_special_tokens=False)["input_ids"])
    texts = [""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        text = tokenizer.convert_tokens_to_string([*before, token])
        texts[index] = text[text.index(_BEFORE) + len(_BEFORE) :]
    return texts


def _moves(strings: Sequence[str]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The state behind each state and character [Q, 1 + C], 0 behind any other; and which states end a string [Q]."""
    states = list(dict.fromkeys(string[:length] for string in strings for length in range(len(string) + 1)))
    numbers = {state: number for number, state in enumerate(states)}
    characters = list(dict.fromkeys("".join(strings)))
    moves = np.zeros((len(states), 1 + len(characters)), np.int32)
    for state, number in numbers.items():
        for column, character in enumerate(characters, start=1):
            text = state + character
            moves[number, column] = next(
                numbers[text[begin:]] for begin in range(len(text) + 1) if text[begin:] in numbers
            )
    return moves, np.array([any(state.endswith(string) for string in strings) for state in states])
