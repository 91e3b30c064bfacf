"""What settings make of scores: as each logits processor of PyTorch's transformers does, padding and all."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from redco_cli.models.generate.scores import processed_scores
from redco_cli.models.generate.settings import read_settings

VOCABULARY, PROMPT, NEW, PAD = 12, 5, 6, 0
HISTORY = np.array([[PAD, PAD, 4, 5, 4, 5, 6, 4, 0, 0, 0], [3, 4, 5, 6, 7, 4, 5, 6, 0, 0, 0]])
"""Two prompts, one of them padded, three tokens of each output, and room for three more."""
SOURCE = np.array([[8, 9, 4, 10, PAD], [5, 6, 11, 6, 7]])


@pytest.mark.parametrize(
    ("settings", "processor"),
    [
        ({"repetition_penalty": 1.5}, RepetitionPenaltyLogitsProcessor(1.5)),
        ({"no_repeat_ngram_size": 1}, NoRepeatNGramLogitsProcessor(1)),
        ({"no_repeat_ngram_size": 3}, NoRepeatNGramLogitsProcessor(3)),
        (
            {"encoder_repetition_penalty": 1.5},
            EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.from_numpy(SOURCE)),
        ),
        (
            {"encoder_no_repeat_ngram_size": 2},
            EncoderNoRepeatNGramLogitsProcessor(2, torch.from_numpy(SOURCE)),
        ),
        (
            {"bad_words_ids": [[1], [2], [6, 4, 3], [5, 9], [6, 10]]},
            NoBadWordsLogitsProcessor([[1], [2], [6, 4, 3], [5, 9], [6, 10]], 2),
        ),
    ],
)
@pytest.mark.parametrize("step", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_scores_are_those_of_pytorch(settings, processor, step):
    scores = np.random.default_rng(step).normal(size=(2, VOCABULARY)).astype(np.float32)
    config = GenerationConfig(eos_token_id=2, max_new_tokens=NEW)
    read = read_settings(config, settings, prompt=PROMPT, where="here")
    found = processed_scores(
        jnp.asarray(scores), read, jnp.asarray(HISTORY), jnp.asarray(SOURCE), jnp.int32(step), PROMPT
    )
    expected = processor(torch.from_numpy(HISTORY[:, : PROMPT + step]), torch.from_numpy(scores)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_new_tokens_are_counted_as_in_pytorch():
    """`min_new_tokens` takes the place of `min_length`; ends are never bad words; lists are tuples."""
    config = GenerationConfig(eos_token_id=[2, 3], min_length=9, bad_words_ids=[[2], [4]])
    read = read_settings(config, {}, prompt=PROMPT, where="here")
    assert (read.min_new, read.bad_words, read.ends) == (4, ((4,),), (2, 3))
    assert read_settings(config, {"min_new_tokens": 1}, prompt=PROMPT, where="here").min_new == 1
    assert hash(read) == hash(dataclasses.replace(read))
