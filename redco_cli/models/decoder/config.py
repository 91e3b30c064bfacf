"""What a decoder is made of: the options that tell one family from another, none of them with a family's name in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "rms_plus_one", "layer"]
NormPlace = Literal["pre", "post", "output", "sandwich"]
Parallel = Literal["no", "one_norm", "two_norms"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: how fast each pair of dims of a head turns with the position.

    Attributes:
        theta: base of the wavelengths.
        dims: how many dims of a head turn, from the first; the others are left as they are.
        kind: how the wavelengths are stretched for long sequences.
        factor: by how much, for every kind but `default` and `longrope`.
        positions: the longest sequence of pre-training; beyond it `dynamic` and `longrope` change their wavelengths,
            and `llama3` and `yarn` choose by it which wavelengths to stretch.
        low_frequency: `llama3`: wavelengths above `positions / low_frequency` are stretched in full.
        high_frequency: `llama3`: those below `positions / high_frequency` are not stretched.
        fast_turns: `yarn`: pairs that turn more often than this within `positions` are not stretched.
        slow_turns: `yarn`: those that turn less often are stretched in full.
        truncate: `yarn`: whether these two bounds are rounded to whole pairs.
        magnitude: multiplies what is rotated (`yarn`, `longrope`).
        short_factors: `longrope`: the divisor of each pair's frequency, up to `positions` tokens.
        long_factors: `longrope`: the same for longer sequences.
    """

    theta: float
    dims: int
    kind: RopeKind = "default"
    factor: float = 1.0
    positions: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A layer's MLP as a choice among many.

    Attributes:
        count: number of experts.
        per_token: how many of them a token goes to: those with the largest router probability.
        width: of each expert's MLP.
        normalise: whether the chosen probabilities are divided by their sum.
        shared_width: of an expert that every token goes to, weighted by a sigmoid gate; 0 for none.
        biases: of the router and of the experts' projections.
        clamped_at: for a SwiGLU whose inputs stay within ± this (gpt-oss), instead of the activation; None for not.
    """

    count: int
    per_token: int
    width: int
    normalise: bool
    shared_width: int = 0
    biases: bool = False
    clamped_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
        family: the Hugging Face model type that it was read from; the key to the names of its tensors.
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the residual stream.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key and value heads; they divide the query heads.
        head_dim: width of a head, whatever the hidden size.
        mlp_width: width of the MLP between its projections.
        embedding_size: width of the token embedding and of what meets the head; a projection leads to the hidden size
            and back where it differs (OPT-350m).
        norm: `rms`; `rms_plus_one` with scales stored less one (Gemma); `layer` with scale and bias.
        norm_eps: added to the variance.
        norm_place: `pre` before attention and MLP; `post` after each residual sum; `output` on what is added to it
            (OLMo 2); `sandwich` before and on what is added (Gemma 2).
        parallel: whether attention and MLP read the same residual stream, with one norm between them or one each.
        embedding_norm: a norm right after the embedding (BLOOM).
        final_norm: a norm after the last layer.
        ropes: the kinds of rotary positions in use.
        layer_ropes: for each layer the index of its kind, None for a layer without; empty without rotary positions.
        interleaved: whether dims 2i and 2i + 1 turn together (GPT-J) instead of i and i + dims / 2.
        rereads_long_texts: whether a text that grows beyond the `positions` of a `longrope` in generation is read again
            from its start, with the other wavelengths (Phi-3).
        learned_positions: rows of the position table, less the offset; 0 for none.
        position_offset: rows before that of position 0 (OPT).
        positions_skip_padding: whether positions count real tokens only, as far as they are not given (OPT).
        restarts_separate: whether positions that are given without a mask, and begin anew in a row, begin another text.
        alibi: a bias linear in the key's position, a slope per head.
        alibi_rounded: whether it is rounded to bfloat16 and scaled like the scores (Falcon).
        windows: for each layer how many tokens a token sees, itself included; None for all before it.
        layer_scales: for each layer what the attention scores are multiplied by besides; empty for one.
        attention_scale: of the products of queries and keys.
        attention_sinks: a score per head that takes its share of the attention and gives nothing (gpt-oss).
        attention_softcap: scores are squashed into ± this; None for not.
        logits_softcap: logits likewise.
        qk_norm: a norm on queries and keys, over each head or over all heads together.
        qkv_bias: biases of the query, key and value projections.
        out_bias: bias of the attention's output projection.
        mlp_bias: biases of the MLP.
        head_bias: bias of the head.
        activation: of the MLP, by its name in transformers.
        gated: whether the MLP multiplies the activation with a second projection.
        experts: instead of one MLP; None for one.
        dense_layers: numbers of the layers that have an MLP though the others have experts.
        embedding_scale: multiplies the embedding.
        residual_scale: multiplies what attention and MLP add to the residual stream.
        logits_scale: multiplies the logits.
        tied: whether the head is the embedding.
        num_labels: outputs of a head that classifies a text by its last token; 0 for one that tells the next token.
        text_padding_id: tokens that such a head does not take for the last; None where nobody says.
        padding_id: a token that does not train its row of the embedding where it is read, as `padding_idx` of PyTorch's
            `Embedding`; None for none.
        embedding_dropout: share of what is dropped of the embedding, in training.
        attention_dropout: of the attention's probabilities.
        residual_dropout: of what attention and MLP add to the residual stream.
        initializer_range: standard deviation of fresh kernels and embeddings.
        scaled_output_init: whether kernels that write to the residual stream start smaller in deep models (GPT-2).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    embedding_size: int
    norm: Norm
    norm_eps: float
    norm_place: NormPlace = "pre"
    parallel: Parallel = "no"
    embedding_norm: bool = False
    final_norm: bool = True
    ropes: tuple[Rope, ...] = ()
    layer_ropes: tuple[int | None, ...] = ()
    interleaved: bool = False
    rereads_long_texts: bool = False
    learned_positions: int = 0
    position_offset: int = 0
    positions_skip_padding: bool = False
    restarts_separate: bool = True
    alibi: bool = False
    alibi_rounded: bool = False
    windows: tuple[int | None, ...]
    layer_scales: tuple[float, ...] = ()
    attention_scale: float
    attention_sinks: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    qk_norm: Literal["no", "head", "all_heads"] = "no"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    activation: str
    gated: bool = True
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tied: bool = False
    num_labels: int = 0
    text_padding_id: int | None = None
    padding_id: int | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    initializer_range: float = 0.02
    scaled_output_init: bool = False
