"""A training step of the Flax classes on CPU beside PyTorch transformers': BERT and T5, as `step.py` has a Llama.

    python tests/bench/encoders.py [--rounds 10] [--only bert]

Same weights, batch and AdamW, two threads, float32, no dropout, 8 rows of 256 tokens; T5 answers with 64. The losses
are those of masked language modelling, of 1 in 7 tokens, and of an answer to a text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from redco_cli.runtime.platforms import begin_again_with_large_pages

    os.environ["JAX_PLATFORMS"] = "cpu"
    begin_again_with_large_pages()

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from redco_cli import load_model
from redco_cli.plugin.contract import IGNORED_LABEL, Loss
from redco_cli.plugin.parts import token_loss
from tests.bench.step import LENGTH, ROWS, compare, redco_step, torch_apart

VOCABULARY, ANSWER = 4096, 64


def bert() -> Any:
    """BERT of 4 layers and 256 features."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **sizes, **no_dropout))


def t5() -> Any:
    """T5 of 3 and 3 layers and 256 features."""
    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def masked_loss(model: Any, params: Any, batch: Any, key: Any) -> Loss:
    """Of the tokens that have a label."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return token_loss(model(params, **inputs, rng=key, train=True), batch["labels"])


def answer_loss(model: Any, params: Any, batch: Any, key: Any) -> Loss:
    """Of the tokens of the answer."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["decoder_input_ids"] = model.decoder_inputs(batch["labels"])
    return token_loss(model(params, **inputs, rng=key, train=True), batch["labels"])


KINDS: dict[str, tuple[Callable[[], Any], Callable[..., Loss], int]] = {
    "bert": (bert, masked_loss, LENGTH),
    "t5": (t5, answer_loss, ANSWER),
}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=list(KINDS))
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else KINDS:
        build, loss, labelled = KINDS[name]
        torch.manual_seed(0)
        peer = build()
        with tempfile.TemporaryDirectory() as folder:
            peer.save_pretrained(folder)
            model, params = load_model(folder)
        draw = np.random.default_rng(0)
        ids, labels = (draw.integers(2, VOCABULARY, (ROWS, length)).astype(np.int32) for length in (LENGTH, labelled))
        if name == "bert":
            labels = np.where(draw.random(ids.shape) < 1 / 7, ids, IGNORED_LABEL).astype(np.int32)
        batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
        size = sum(leaf.numel() for leaf in peer.parameters()) / 1e6
        print(f"{name} of {size:.2f}M parameters, {ROWS} x {LENGTH} tokens, 2 threads")
        with torch_apart(peer, batch) as theirs:
            compare(f"a {size:.0f}M {name}", theirs, redco_step(model, params, batch, loss), arguments.rounds)


if __name__ == "__main__":
    main()
