"""Which settings of each model type a Flax class is proven to compute as PyTorch does, and how each is proven.

`PROVEN` is the whole knowledge, and the only source of it: `keys` refuses a setting that is not in it, and
tests/models/flax/test_proven.py runs each case: PyTorch's logits and gradients change with each of its settings, and
those of the Flax class are PyTorch's. A setting that is added here is therefore honoured and tested at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DROPPED = 1 - 2**-20
"""A rate of dropout at which all is dropped, so that two libraries drop the same; 1 divides by zero in Flax."""


@dataclass(frozen=True)
class Case:
    """Settings that are proven together, on a tiny random model.

    Attributes:
        settings: name to value, each other than the default.
        tasks: the heads that it is proven with; empty for all that the model type has.
        length: how many tokens are read, where they are.
        inside: the composite model type that it is proven in; empty for a model of its own.
    """

    settings: Mapping[str, Any]
    tasks: tuple[str, ...] = ()
    length: int = 8
    inside: str = ""

    @property
    def masks(self) -> bool:
        """Whether it is about SpecAugment."""
        return any(key.startswith("mask_") or key == "apply_spec_augment" for key in self.settings)

    @property
    def trains(self) -> bool:
        """Whether it is about what is dropped in training."""
        return self.masks or DROPPED in self.settings.values()


def _each(key: str, values: str, task: str = "", inside: str = "") -> tuple[Case, ...]:
    """A case for each of the values between blanks."""
    return tuple(Case({key: value}, (task,) if task else (), inside=inside) for value in values.split())


def _dropouts(keys: str, task: str = "", inside: str = "") -> tuple[Case, ...]:
    return tuple(Case({key: DROPPED}, (task,) if task else (), inside=inside) for key in keys.split())


def _numbers(text: str) -> dict[str, Any]:
    """Settings and their numbers in turn, between blanks.

    >>> _numbers("n_layer 3 layer_norm_epsilon 0.1")
    {'n_layer': 3, 'layer_norm_epsilon': 0.1}
    """
    words = text.split()
    return {key: float(one) if "." in one else int(one) for key, one in zip(words[::2], words[1::2], strict=True)}


_CLASSIFYING = ("sequence_classification", "token_classification")
_SIZES = {"vocab_size": 72, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
_BERT_SIZES = {**_SIZES, "intermediate_size": 40, "max_position_embeddings": 48, "type_vocab_size": 3}
_BERT_DROPOUTS = "hidden_dropout_prob attention_probs_dropout_prob"
_ACTS = "gelu_new relu silu"


def _bert(
    more: Mapping[str, Any], *, acts: str = _ACTS, pad: int = 5, classifier: str = "classifier_dropout"
) -> tuple[Case, ...]:
    return (
        Case({**_BERT_SIZES, "layer_norm_eps": 0.1, "pad_token_id": pad, **more}),
        *_each("hidden_act", acts, "masked_lm"),
        *_dropouts(_BERT_DROPOUTS, "masked_lm"),
        *(Case({classifier: DROPPED}, (task,)) for task in _CLASSIFYING if classifier),
    )


_AS_DECODER = Case({"is_decoder": True}, ("masked_lm",))
_BART_SIZES = _numbers(
    """
    vocab_size 72 d_model 24 encoder_layers 3 decoder_layers 1 encoder_attention_heads 2 decoder_attention_heads 6
    encoder_ffn_dim 40 decoder_ffn_dim 24
    """
)
_BART_DROPOUTS = "dropout attention_dropout activation_dropout encoder_layerdrop decoder_layerdrop"


def _bart(more: Mapping[str, Any], *, task: str = "seq2seq", acts: str = _ACTS) -> tuple[Case, ...]:
    return (
        Case({**_BART_SIZES, "pad_token_id": 3, **more}),
        *_each("activation_function", acts, task),
        *_dropouts(_BART_DROPOUTS, task),
    )


_BART_MORE = {"max_position_embeddings": 48, "scale_embedding": True}
_ENDS = {"eos_token_id": 6}, {"classifier_dropout": DROPPED}
_BART_CLASSIFYING = tuple(Case(one, ("sequence_classification",)) for one in _ENDS)
_T5_SIZES = _numbers(
    """
    vocab_size 72 d_model 24 d_kv 6 d_ff 40 num_layers 3 num_decoder_layers 1 num_heads 2 layer_norm_epsilon 0.1
    relative_attention_num_buckets 8 relative_attention_max_distance 6
    """
)


def _t5(tied: bool, acts: str, gates: str) -> tuple[Case, ...]:
    return (
        Case(_T5_SIZES),
        Case({"tie_word_embeddings": tied}),
        Case({"dense_act_fn": "silu", "is_gated_act": not tied}),
        *_each("dense_act_fn", acts),
        *_each("feed_forward_proj", gates),
        *_dropouts("dropout_rate"),
    )


_BEIT_SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
_IMAGE_SIZES = {**_BEIT_SIZES, "image_size": 24}
_LLAMA_SIZES = {**_SIZES, **_numbers("intermediate_size 40 num_key_value_heads 1 rms_norm_eps 0.1 pad_token_id 5")}
_LLAMA_ACTS = _each("hidden_act", "gelu gelu_new relu")
_GPT2_SIZES = {"vocab_size": 72, "n_embd": 24, "n_layer": 3, "n_head": 2, "n_inner": 40, "n_positions": 48}
_GPTJ_SIZES = _numbers("vocab_size 72 n_embd 24 n_layer 3 n_head 2 n_inner 40 rotary_dim 6 layer_norm_epsilon 0.1")
_GPT2 = (
    Case({**_GPT2_SIZES, "layer_norm_epsilon": 0.1}),
    Case({"tie_word_embeddings": False}),
    *_each("activation_function", "gelu relu silu"),
    *_dropouts("resid_pdrop embd_pdrop attn_pdrop"),
)
_ROBERTA = (*_bert({}, pad=3), _AS_DECODER)
_RESNET_SIZES = {"embedding_size": 6, "hidden_sizes": [8, 12, 16], "depths": [1, 1, 2]}
_CLIP_SIZES = {**_SIZES, "intermediate_size": 40, "layer_norm_eps": 0.1}
_GPT_NEO_SIZES = _numbers(
    "vocab_size 72 hidden_size 24 num_layers 3 num_heads 2 intermediate_size 40 window_size 3 layer_norm_epsilon 0.1"
)
_XGLM_SIZES = _numbers("vocab_size 72 d_model 24 ffn_dim 40 num_layers 3 attention_heads 2")
_CONVOLUTIONS = {"conv_dim": [6, 8, 6], "conv_kernel": [8, 3, 2], "conv_stride": [4, 2, 2], "conv_bias": True}
_WAV2VEC2_SIZES = _numbers(
    """
    hidden_size 24 num_hidden_layers 3 num_attention_heads 2 intermediate_size 40
    num_conv_pos_embeddings 8 num_conv_pos_embedding_groups 2
    """
)
_ADAPTER = {"add_adapter": True, "adapter_stride": 1, "num_adapter_layers": 2}
_SPEECH = "speech-encoder-decoder"

PROVEN: Mapping[str, tuple[Case, ...]] = {
    "albert": (
        *_bert({"embedding_size": 12}, acts="gelu relu silu", classifier="classifier_dropout_prob"),
        *(Case({key: 2}, ("masked_lm",)) for key in ("num_hidden_groups", "inner_group_num")),
    ),
    "bart": (*_bart(_BART_MORE), *_BART_CLASSIFYING, Case({"tie_word_embeddings": False}, ("seq2seq",))),
    "beit": (
        Case({**_BEIT_SIZES, "intermediate_size": 40, "layer_norm_eps": 0.1, "num_channels": 1}),
        Case({"use_absolute_position_embeddings": True, "use_mean_pooling": False, "image_size": 24}),
        Case({"use_relative_position_bias": True, "layer_scale_init_value": 0}),
        Case({"use_shared_relative_position_bias": True}),
        *_each("hidden_act", "relu silu"),
        *_dropouts(f"{_BERT_DROPOUTS} drop_path_rate"),
    ),
    "bert": (*_bert({}), _AS_DECODER),
    "big_bird": (
        *_bert({"rescale_embeddings": True}, acts="gelu relu silu"),
        Case({"attention_type": "original_full"}, ("masked_lm",), length=32),
        Case({"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 2}, ("masked_lm",), length=32),
        Case({"sep_token_id": 7}, ("question_answering",)),
    ),
    "blenderbot": _bart(_BART_MORE),
    "blenderbot-small": _bart(_BART_MORE, acts="relu silu"),
    "bloom": (
        Case({"vocab_size": 72, "hidden_size": 24, "n_layer": 3, "n_head": 2, "layer_norm_epsilon": 0.1}),
        Case({"apply_residual_connection_post_layernorm": True}),
        Case({"tie_word_embeddings": False}),
        *_dropouts("attention_dropout"),
    ),
    "clip": (Case({"projection_dim": 12}),),
    "clip_text_model": (
        Case({**_CLIP_SIZES, "max_position_embeddings": 48}),
        *_each("hidden_act", "gelu gelu_new relu"),
        *_dropouts("attention_dropout"),
        Case({**_CLIP_SIZES, "max_position_embeddings": 48, "eos_token_id": 6}, inside="clip"),
        *_each("hidden_act", "gelu gelu_new relu", inside="clip"),
        *_dropouts("attention_dropout", inside="clip"),
    ),
    "clip_vision_model": (
        Case({**_IMAGE_SIZES, "intermediate_size": 40, "layer_norm_eps": 0.1}, inside="clip"),
        *_each("hidden_act", "gelu gelu_new relu", inside="clip"),
        *_dropouts("attention_dropout", inside="clip"),
    ),
    "dinov2": (
        Case({**_IMAGE_SIZES, "mlp_ratio": 3, "layer_norm_eps": 0.1, "num_channels": 1, "qkv_bias": False}),
        Case({"use_swiglu_ffn": True}),
        *_each("hidden_act", _ACTS),
        *_dropouts(f"{_BERT_DROPOUTS} drop_path_rate"),
    ),
    "distilbert": (
        Case(
            _numbers(
                "vocab_size 72 dim 24 n_layers 3 n_heads 2 hidden_dim 40 max_position_embeddings 48 pad_token_id 5"
            )
        ),
        *_each("activation", _ACTS, "masked_lm"),
        *_dropouts("dropout attention_dropout", "masked_lm"),
        *_dropouts("seq_classif_dropout", "sequence_classification"),
        *_dropouts("qa_dropout", "question_answering"),
    ),
    "electra": (
        *_bert({"embedding_size": 12}, acts=""),
        *_each("hidden_act", _ACTS, "sequence_classification"),
        _AS_DECODER,
    ),
    "gemma": (
        Case({**_LLAMA_SIZES, "head_dim": 8, "attention_bias": True}),
        Case({"tie_word_embeddings": False}),
        *_each("hidden_act", "gelu relu silu"),
        *_dropouts("attention_dropout"),
    ),
    "gpt-sw3": _GPT2,
    "gpt2": _GPT2,
    "gpt_neo": (
        Case({**_GPT_NEO_SIZES, "max_position_embeddings": 48, "attention_types": [[["local", "global", "local"], 1]]}),
        Case({"tie_word_embeddings": False}),
        *_each("activation_function", "gelu relu silu"),
        *_dropouts("embed_dropout attention_dropout resid_dropout"),
    ),
    "gptj": (
        Case(_GPTJ_SIZES),
        *_each("activation_function", "gelu relu silu"),
        *_dropouts("resid_pdrop embd_pdrop attn_pdrop"),
    ),
    "llama": (Case({**_LLAMA_SIZES, "attention_bias": True}), *_LLAMA_ACTS, *_dropouts("attention_dropout")),
    "longt5": (
        *_t5(False, "gelu gelu_new", "gated-gelu gated-silu"),
        Case({"local_radius": 3}, length=24),
        Case({"encoder_attention_type": "transient-global", "global_block_size": 4}, length=24),
    ),
    "marian": _bart(_BART_MORE, acts=f"{_ACTS} swish"),
    "mbart": (*_bart(_BART_MORE), *_BART_CLASSIFYING),
    "mistral": (Case(_LLAMA_SIZES), *_LLAMA_ACTS),
    "mt5": _t5(True, "gelu relu", "relu gated-silu"),
    "opt": (
        Case({**_SIZES, "ffn_dim": 40, "max_position_embeddings": 48, "word_embed_proj_dim": 12, "pad_token_id": 5}),
        Case({"do_layer_norm_before": False}),
        Case({"_remove_final_layer_norm": True}),
        Case({"tie_word_embeddings": False}),
        *_each("activation_function", "gelu gelu_new silu"),
        *_dropouts("dropout attention_dropout layerdrop"),
    ),
    "pegasus": _bart(_BART_MORE),
    "regnet": (Case({**_RESNET_SIZES, "groups_width": 2}), *_each("hidden_act", "gelu silu")),
    "resnet": (Case({**_RESNET_SIZES, "downsample_in_first_stage": True}), *_each("hidden_act", "gelu silu")),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "roformer": _bert({"rotary_value": True}, classifier=""),
    "t5": _t5(False, "gelu gelu_new", "gated-gelu gated-silu"),
    "vision-text-dual-encoder": (Case({"projection_dim": 12}),),
    "vit": (
        Case({**_IMAGE_SIZES, "intermediate_size": 40, "layer_norm_eps": 0.1, "num_channels": 1, "qkv_bias": False}),
        *_each("hidden_act", "relu silu"),
        *_dropouts(_BERT_DROPOUTS),
        Case({"pooler_act": "relu"}, inside="vision-text-dual-encoder"),
    ),
    "wav2vec2": (
        Case({**_CONVOLUTIONS, **_WAV2VEC2_SIZES}, inside=_SPEECH),
        Case(_ADAPTER, inside=_SPEECH),
        Case({"do_stable_layer_norm": True, "feat_extract_norm": "layer"}, inside=_SPEECH),
        *_each("hidden_act", "relu silu", inside=_SPEECH),
        *_each("feat_extract_activation", _ACTS, inside=_SPEECH),
        *_dropouts("hidden_dropout attention_dropout activation_dropout feat_proj_dropout layerdrop", inside=_SPEECH),
        Case({"mask_time_prob": 1.0, "mask_time_length": 1}, inside=_SPEECH),
        Case({"mask_time_min_masks": 100, "mask_time_length": 1}, inside=_SPEECH),
        Case({"apply_spec_augment": False}, inside=_SPEECH),
    ),
    "whisper": _bart(
        _numbers("num_mel_bins 12 max_source_positions 8 max_target_positions 24"), task="speech_to_sequence"
    ),
    "xglm": (
        Case({**_XGLM_SIZES, "scale_embedding": False}),
        Case({"tie_word_embeddings": False}),
        *_each("activation_function", "relu silu"),
        *_dropouts("dropout attention_dropout activation_dropout layerdrop"),
    ),
    "xlm-roberta": _ROBERTA,
}
"""Model type to its cases."""

CAUSAL = frozenset({"bart", "big_bird"})
"""Types that are proven with `is_decoder: true` for causal_lm only, by their cases for all tasks."""

COMPOSED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "encoder-decoder": (("bert", "gpt2"), ("bert", "bert")),
    "speech-encoder-decoder": (("wav2vec2", "bart"),),
    "vision-encoder-decoder": (("vit", "gpt2"), ("vit", "bert")),
    "vision-text-dual-encoder": (("vit", "bert"), ("clip_vision_model", "bert")),
}
"""Composite model type to the types of its parts, encoder or images first, that are proven together."""
