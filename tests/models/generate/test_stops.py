"""Stop strings: an output ends where it ends in PyTorch, token by token."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from redco_cli.errors import ModelError
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.models.generate.stops import stops_of, token_texts

WORDS = [
    *"abcdefstopl -",
    "st",
    "op",
    "to",
    "sto",
    "pp",
    "las",
    "topper",
    "stop",
    "s st",
    "opst",
    "abab",
    "ba",
    "--",
    "",
]
STRINGS = ("stop", "abab-", "p", "--a")


def word_tokenizer():
    """Tokens that are the text which they add."""
    vocabulary = {word: index for index, word in enumerate(word for word in WORDS if word)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("strings", [STRINGS[:1], STRINGS[1:2], STRINGS])
def test_outputs_end_where_they_end_in_pytorch(strings):
    """Random texts, at each of their tokens; the beginning is a prompt, which may begin a stop string."""
    tokenizer = word_tokenizer()
    ids = np.random.default_rng(0).integers(0, len(tokenizer), (800, 12))
    criteria = StopStringCriteria(tokenizer, list(strings))
    stops = stops_of(strings, tokenizer, "here")
    states = stops.read(ids[:, :4])
    ended = np.zeros(2, int)
    for place in range(4, ids.shape[1]):
        states, found = stops.step(states, ids[:, place])
        np.testing.assert_array_equal(found, criteria(torch.from_numpy(ids[:, : place + 1]), None).numpy())
        ended += np.bincount(np.asarray(found).astype(int), minlength=2)
    assert (ended > 3).all()


def test_the_byte_tokenizer_ends_behind_the_last_byte():
    stops = stops_of(("né",), ByteTokenizer(), "here")
    states, found = np.zeros(1, int), []
    for byte in "anné ".encode():
        states, ends = stops.step(states, np.array([byte]))
        found.append(bool(ends[0]))
    assert found == [False, False, False, False, True, False]
    assert token_texts(ByteTokenizer())[65] == "A"


def test_ids_beyond_the_vocabulary_begin_anew():
    stops = stops_of(("stop",), word_tokenizer(), "here")
    states, _ = stops.step(np.zeros(2, int), np.array([WORDS.index("sto"), WORDS.index("sto")]))
    states, _ = stops.step(states, np.array([500, WORDS.index("l")]))
    assert states.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            None,
            "here: stop_strings: ['stop'] need the tokenizer, which says what each token adds to a text\n"
            "  -> pass tokenizer=ctx.tokenizer to ctx.model.generate",
        ),
        (
            object(),
            "here: stop_strings need the text of each token, which object does not give: 'object' object has no "
            "attribute 'vocab_size'\n  -> leave stop_strings out, or take another tokenizer",
        ),
    ],
)
def test_says_what_stop_strings_need(tokenizer, message):
    with pytest.raises(ModelError) as caught:
        stops_of(("stop",), tokenizer, "here")
    assert str(caught.value) == message
