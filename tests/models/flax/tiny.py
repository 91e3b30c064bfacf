"""Tiny configs of every model type with a Flax class, inputs for them, and their logits by PyTorch and by redco."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection

_BERT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
_WORDS = {"vocab_size": 64, "max_position_embeddings": 40}
_LLAMA = {**_BERT, "num_key_value_heads": 2}
_BART = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
_WAV2VEC2 = {
    **{key: value for key, value in _BERT.items() if key != "max_position_embeddings"},
    "model_type": "wav2vec2",
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_CROSS = {"is_decoder": True, "add_cross_attention": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "albert": {**_BERT, "embedding_size": 8},
    "bart": _BART,
    "beit": _VIT,
    "bert": _BERT,
    "big_bird": {**_BERT, "attention_type": "original_full", "block_size": 4, "num_random_blocks": 1},
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "bloom": {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "clip": {
        "text_config": {**_BERT, "projection_dim": 8, "eos_token_id": 3},
        "vision_config": {**_VIT, "projection_dim": 8},
        "projection_dim": 8,
    },
    "clip_text_model": {**_BERT, "projection_dim": 8, "eos_token_id": 3},
    "dinov2": {key: value for key, value in _VIT.items() if key != "intermediate_size"} | {"mlp_ratio": 2},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, **_WORDS},
    "electra": {**_BERT, "embedding_size": 8},
    "encoder-decoder": {
        "encoder": {**_BERT, "model_type": "bert"},
        "decoder": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, **_CROSS},
        "pad_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "gemma": {**_LLAMA, "head_dim": 4, "hidden_act": "gelu_pytorch_tanh"},
    "gpt-sw3": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "gpt_neo": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 40,
    },
    "gptj": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 40},
    "llama": _LLAMA,
    "longt5": {**_T5, "encoder_attention_type": "local", "local_radius": 4},
    "marian": _BART,
    "mbart": _BART,
    "mistral": _LLAMA,
    "mt5": {**_T5, "tie_word_embeddings": False},
    "opt": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 40,
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
    },
    "pegasus": _BART,
    "regnet": {**_RESNET, "groups_width": 4},
    "resnet": _RESNET,
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "roformer": _BERT,
    "speech-encoder-decoder": {
        "encoder": _WAV2VEC2,
        "decoder": {**_BART, **_CROSS, "model_type": "bart"},
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    },
    "t5": _T5,
    "vision-encoder-decoder": {
        "encoder": {**_VIT, "model_type": "vit"},
        "decoder": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, **_CROSS},
        "pad_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "vision-text-dual-encoder": {
        "text_config": {**_BERT, "model_type": "bert"},
        "vision_config": {**_VIT, "model_type": "vit"},
        "projection_dim": 8,
    },
    "vit": _VIT,
    "whisper": {
        **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 20,
    },
    "xglm": {
        "vocab_size": 64,
        "d_model": 16,
        "ffn_dim": 32,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 40,
    },
    "xlm-roberta": _BERT,
}

TORCH_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "image_classification": "AutoModelForImageClassification",
    "vision_to_sequence": "VisionEncoderDecoderModel",
    "speech_to_sequence": "AutoModelForSpeechSeq2Seq",
    "clip": "AutoModel",
    "text_encoder": "CLIPTextModel",
}


@dataclass(frozen=True)
class Saved:
    """A random PyTorch model, saved, with the section of a recipe that names it."""

    torch_model: Any
    directory: Path
    section: ModelSection


def where(key: str) -> str:
    return f"recipe.yaml:3: {key}"


def config_for(model_type: str, task: str, **changed: Any) -> dict[str, Any]:
    """The tiny config of a model type for a task, as an inline config."""
    config = copy.deepcopy(CONFIGS[model_type]) | {"model_type": model_type}
    if task == "causal_lm" and CONFIGS[model_type] in (_BERT, CONFIGS["electra"], CONFIGS["big_bird"]):
        config["is_decoder"] = True
    if task.endswith("_classification"):
        config["num_labels"] = 3
    return config | copy.deepcopy(changed)  # building a composite empties its parts


def save_torch(config: dict[str, Any], task: str, directory: Path, **saving: Any) -> Saved:
    """A PyTorch model with random weights (biases and scales too) in `directory`."""
    import torch
    import transformers

    values = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.CONFIG_MAPPING[config["model_type"]](**values)
    hf_config._attn_implementation = "eager"
    torch.manual_seed(0)
    torch_class = getattr(transformers, TORCH_CLASSES[task])
    build = torch_class.from_config if hasattr(torch_class, "from_config") else torch_class
    model = build(hf_config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory, **saving)
    return Saved(model, directory, ModelSection(name=str(directory), task=task, implementation="hf_flax"))


def inputs_for(model_type: str, task: str, seed: int = 0, length: int = 8) -> dict[str, np.ndarray]:
    """Inputs of a batch of two, by name; the second row of text is padded."""
    rng = np.random.default_rng(seed)
    text = {
        "input_ids": rng.integers(4, 60, (2, length)).astype(np.int32),
        "attention_mask": np.array([[1] * length, [1] * (length - 3) + [0] * 3], np.int32),
    }
    decoder = {"decoder_input_ids": rng.integers(4, 60, (2, 5)).astype(np.int32)}
    image = {"pixel_values": rng.normal(size=(2, 3, 16, 16)).astype(np.float32)}
    if task in ("sequence_classification", "question_answering") and model_type in ("bart", "mbart"):
        text["input_ids"][:, 4] = 2
    if task == "seq2seq":
        return text | decoder
    if task == "image_classification":
        return image
    if task == "vision_to_sequence":
        return image | decoder
    if task == "clip":
        text["input_ids"][:, 4] = 3
        return text | image
    if model_type == "whisper":
        return {"input_features": rng.normal(size=(2, 8, 20)).astype(np.float32)} | decoder
    if task == "speech_to_sequence":
        return {"inputs": rng.normal(size=(2, 200)).astype(np.float32)} | decoder
    return text


def torch_outputs(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs that carry logits, by PyTorch."""
    import torch

    with torch.no_grad():
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        outputs = model(
            **{name: value.long() if value.dtype == torch.int32 else value for name, value in tensors.items()}
        )
    return {name: value.numpy() for name, value in logits_of(outputs).items()}


def logits_of(outputs: Any) -> dict[str, Any]:
    """The outputs of a PyTorch model that carry logits; of a text encoder the hidden states, by that name."""
    found = {name: value for name, value in outputs.items() if "logits" in name}
    return found or {"logits": outputs["last_hidden_state"]}


def redco_outputs(saved: Saved, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same by redco, from the saved weights."""
    model = resolve_model(saved.section, where=where)
    params = load_params(model, saved.directory).params
    outputs = jax.jit(lambda params, inputs: model(params, **inputs))(params, inputs)
    if not hasattr(outputs, "items"):
        return {"logits": np.asarray(outputs)}
    return {name: np.asarray(value) for name, value in outputs.items() if "logits" in name}


def largest_difference(model_type: str, task: str, directory: Path, length: int = 8, **changed: Any) -> float:
    """The largest difference between PyTorch's and redco's logits, over real tokens."""
    saved = save_torch(config_for(model_type, task, **changed), task, directory)
    inputs = inputs_for(model_type, task, length=length)
    expected, found = torch_outputs(saved.torch_model, inputs), redco_outputs(saved, inputs)
    assert expected.keys() == found.keys()
    differences = []
    for name, value in expected.items():
        assert value.shape == found[name].shape
        mask = inputs.get("attention_mask")
        real = mask.astype(bool) if mask is not None and value.shape[:2] == mask.shape else ...
        differences.append(np.abs(value[real] - found[name][real]).max())
    return float(max(differences))
