"""Logits of tiny random checkpoints: redco's against PyTorch's."""

import pytest

from redco_cli.models.config.tasks import flax_class_names
from tests.models.flax.tiny import CONFIGS, config_for, largest_difference

COVERING = [
    ("llama", "causal_lm"),
    ("gpt2", "causal_lm"),
    ("bert", "masked_lm"),
    ("roberta", "token_classification"),
    ("distilbert", "question_answering"),
    ("electra", "sequence_classification"),
    ("t5", "seq2seq"),
    ("bart", "seq2seq"),
    ("vit", "image_classification"),
    ("resnet", "image_classification"),
    ("vision-encoder-decoder", "vision_to_sequence"),
    ("whisper", "speech_to_sequence"),
    ("clip", "clip"),
    ("clip_text_model", "text_encoder"),
]
"""Every task, and every quirk of the classes, once."""
ALL = [(model_type, task) for model_type in CONFIGS for task in flax_class_names(model_type)]


@pytest.mark.parametrize(("model_type", "task"), COVERING)
def test_logits_equal_pytorch(model_type, task, tmp_path):
    assert largest_difference(model_type, task, tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "task"), [pair for pair in ALL if pair not in COVERING])
def test_logits_equal_pytorch_everywhere(model_type, task, tmp_path):
    assert largest_difference(model_type, task, tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        ("bloom", {"n_head": 6, "hidden_size": 24}),
        ("llama", {"num_key_value_heads": 1, "attention_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("gemma", {"hidden_act": "gelu"}),
        ("gemma", {"head_dim": 8}),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 8}),
        ("gpt_neo", {"attention_types": [[["local"], 2]], "window_size": 3}),
    ],
)
def test_what_is_often_forgotten_in_decoders(model_type, changed, tmp_path):
    assert largest_difference(model_type, "causal_lm", tmp_path, **changed) < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:jax.nn.one_hot input should be integer-typed")  # the Flax LongT5
@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        ("longt5", {"encoder_attention_type": "transient-global"}),
        ("bart", {"scale_embedding": True}),
        ("encoder-decoder", {"decoder": config_for("bert", "causal_lm", add_cross_attention=True)}),
    ],
)
def test_what_is_often_forgotten_in_pairs(model_type, changed, tmp_path):
    assert largest_difference(model_type, "seq2seq", tmp_path, **changed) < 1e-4
