"""What the building blocks for plugins make of generated tokens: texts, samples of them, and log-probabilities."""

import numpy as np
import pytest

from redco_cli.errors import PluginError, UsageError
from redco_cli.models.config.byte_tokenizer import EOS, PAD, ByteTokenizer
from redco_cli.plugin.parts import decode, exact_match
from redco_cli.prediction.prompt import answer_text

IDS = np.array([[[65, 66, EOS, PAD], [67, EOS, PAD, PAD]], [[68, 69, 70, 71], [EOS, PAD, PAD, PAD]]])
OUTPUTS = {"ids": IDS, "log_probs": -np.arange(16.0).reshape(2, 2, 4), "lengths": np.array([[3, 2], [4, 1]])}


def test_outputs_become_texts_lists_of_texts_or_dicts():
    tokenizer = ByteTokenizer()
    assert decode(tokenizer, IDS[:, 0]) == ["AB", "DEFG"]
    assert decode(tokenizer, IDS) == [["AB", "C"], ["DEFG", ""]]
    one = decode(tokenizer, {name: array[:, 0] for name, array in OUTPUTS.items()})
    assert one == [{"text": "AB", "log_probs": [-0.0, -1, -2]}, {"text": "DEFG", "log_probs": [-8, -9, -10, -11]}]
    assert decode(tokenizer, OUTPUTS)[1][1] == {"text": "", "log_probs": [-12]}


def test_a_match_is_that_of_the_text():
    assert exact_match([{"text": "AB ", "log_probs": []}, "C"], ["AB", "D"]) == 0.5
    with pytest.raises(PluginError) as caught:
        exact_match([["AB", "C"]], ["AB"])
    assert str(caught.value) == (
        "exact_match: predict.generation.num_samples makes lists of texts, which no reference equals\n"
        "  -> set predict.generation.num_samples: 1, or write a metric_fn"
    )


def test_a_conversation_goes_on_from_one_text():
    assert (answer_text("yes"), answer_text({"text": "yes", "log_probs": []})) == ("yes", "yes")
    with pytest.raises(UsageError) as caught:
        answer_text(["yes", "no"])
    assert str(caught.value) == (
        "--chat: a conversation goes on from one answer, but predict.generation.num_samples makes several\n"
        "  -> add predict.generation.num_samples=1"
    )
