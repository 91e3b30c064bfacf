"""Settings that the Flax classes get wrong: refused, and really wrong when they are not."""

import pytest

from redco_cli.errors import ModelError
from redco_cli.models import resolve
from redco_cli.models.flax.refusals import REFUSALS
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import CONFIGS, config_for, largest_difference, where

CASES = {
    "rope_theta": ("llama", "causal_lm", 30000.0, 10000.0),
    "rope_scaling": ("llama", "causal_lm", {"rope_type": "linear", "factor": 2.0}, None),
    "tie_word_embeddings": ("llama", "causal_lm", True, False),
    "head_dim": ("llama", "causal_lm", 8, 4),
    "mlp_bias": ("llama", "causal_lm", True, False),
    "sliding_window": ("mistral", "causal_lm", None, 4096),
    "scale_attn_weights": ("gpt2", "causal_lm", False, True),
    "scale_attn_by_inverse_layer_idx": ("gpt2", "causal_lm", True, False),
    "position_embedding_type": ("bert", "masked_lm", "relative_key", "absolute"),
    "use_bias": ("big_bird", "masked_lm", False, True),
    "hidden_act": ("electra", "masked_lm", "relu", "gelu"),
    "sinusoidal_pos_embds": ("distilbert", "masked_lm", True, False),
    "layerscale_value": ("dinov2", "image_classification", 0.5, 1.0),
    "share_encoder_decoder_embeddings": ("marian", "seq2seq", False, True),
    "pad_token_id": ("xglm", "causal_lm", 3, 1),
    "enable_bias": ("opt", "causal_lm", False, True),
    "layer_type": ("resnet", "image_classification", "basic", "bottleneck"),
    "downsample_in_bottleneck": ("resnet", "image_classification", True, False),
}
"""Setting: model type, task, a value that is refused, one that is honoured."""
SECOND = {
    ("gptj", "tie_word_embeddings"): ("causal_lm", True, False),
    ("whisper", "tie_word_embeddings"): ("speech_to_sequence", False, True),
    ("gemma", "rope_theta"): ("causal_lm", 30000.0, 10000.0),
}
MEASURED = [(kind, task, key, bad, good) for key, (kind, task, bad, good) in CASES.items()] + [
    (kind, task, key, bad, good) for (kind, key), (task, bad, good) in SECOND.items()
]


def resolved(model_type, task, **changed):
    section = ModelSection(config=config_for(model_type, task, **changed), task=task, implementation="hf_flax")
    return resolve_model(section, where=where)


UNMEASURED = {
    "layer_norm_eps",  # of the encoder of a pair, in a test of its own
    "hidden_activation",  # PyTorch ignores it, so that there is nothing to compare with
    "layer_norm_elementwise_affine",  # PyTorch cannot build it
}


def test_every_refusal_is_measured():
    assert {refusal.key for refusal in REFUSALS} - UNMEASURED == set(CASES)


@pytest.mark.parametrize(("model_type", "task", "key", "refused", "honoured"), MEASURED)
def test_refuses_the_value_and_takes_its_neighbour(model_type, task, key, refused, honoured):
    with pytest.raises(
        ModelError, match=f"^recipe.yaml:3: model.config.{key}: {model_type} with {key}: .* run wrongly"
    ):
        resolved(model_type, task, **{key: refused})
    assert getattr(resolved(model_type, task, **{key: honoured}).config, key) == honoured


def test_the_message_names_value_and_reason():
    with pytest.raises(ModelError) as caught:
        resolved("llama", "causal_lm", rope_theta=500000.0)
    assert str(caught.value) == (
        "recipe.yaml:3: model.config.rope_theta: llama with rope_theta: 500000.0 would run wrongly: "
        "its Flax class always computes with 10000\n  -> choose a model without this setting"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "task", "key", "refused", "honoured"), MEASURED)
def test_a_refused_value_is_really_wrong(model_type, task, key, refused, honoured, tmp_path, monkeypatch):
    assert largest_difference(model_type, task, tmp_path / "good", length=16, **{key: honoured}) < 1e-4
    monkeypatch.setattr(resolve, "refuse_unsupported", lambda *_args, **_named: None)
    try:
        difference = largest_difference(model_type, task, tmp_path / "bad", length=16, **{key: refused})
    except ModelError:
        return  # it cannot even be built or loaded
    assert difference > 1e-3


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        (
            "encoder-decoder",
            {"decoder": CONFIGS["encoder-decoder"]["decoder"] | {"add_cross_attention": False}},
            "model.config.decoder.add_cross_attention: add_cross_attention is false: the decoder would not follow its "
            "encoder\n  -> set add_cross_attention: true",
        ),
        (
            "encoder-decoder",
            {"encoder": CONFIGS["roberta"] | {"model_type": "roberta"}},
            "model.config.encoder.model_type: roberta inside encoder-decoder would run wrongly: positions are counted "
            "from 0 there\n  -> choose a part of another model type: bert",
        ),
        (
            "encoder-decoder",
            {"decoder": CONFIGS["encoder-decoder"]["decoder"] | {"scale_attn_weights": False}},
            "model.config.decoder.scale_attn_weights: gpt2 with scale_attn_weights: false would run wrongly: its Flax "
            "class always scales\n  -> choose a model without this setting",
        ),
    ],
)
def test_refuses_pairs_that_do_not_work(model_type, changed, message):
    with pytest.raises(ModelError) as caught:
        resolved(model_type, "seq2seq", **changed)
    assert str(caught.value) == f"recipe.yaml:3: {message}"


def test_refuses_an_epsilon_of_wav2vec2():
    encoder = CONFIGS["speech-encoder-decoder"]["encoder"]
    resolved("speech-encoder-decoder", "speech_to_sequence", encoder=encoder | {"layer_norm_eps": 1e-5})
    with pytest.raises(ModelError) as caught:
        resolved("speech-encoder-decoder", "speech_to_sequence", encoder=encoder | {"layer_norm_eps": 0.1})
    assert str(caught.value) == (
        "recipe.yaml:3: model.config.encoder.layer_norm_eps: wav2vec2 with layer_norm_eps: 0.1 would run wrongly: its "
        "Flax class uses it in the convolutions too\n  -> choose a model without this setting"
    )


def test_refuses_a_causal_model_that_looks_ahead():
    with pytest.raises(ModelError) as caught:
        resolved("bert", "causal_lm", is_decoder=False)
    assert str(caught.value) == (
        "recipe.yaml:3: model.config.is_decoder: bert with is_decoder: false sees the tokens it should predict\n"
        "  -> set is_decoder: true, or choose model.task masked_lm"
    )
