"""What a family is: how its configs are read, what its tensors are called, and examples that prove both.

The left side of a table of names is a module or a parameter of the decoder, joined by `/`; the right side is the module
that holds it in transformers, with `{layer}` and `{expert}` for numbers. A fused module holds several of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.families.shared.settings import Settings

Options = dict[str, Any]
"""Arguments of `DecoderConfig`."""
CLASSIFIER = "score"
"""A head that classifies texts, ours and theirs."""
HfConfig = dict[str, Any]
"""Settings of a Hugging Face config."""


@dataclass(frozen=True)
class Fused:
    """Several projections in one tensor, along its output dim: groups, then parts of each group, then a block.

    Attributes:
        modules: ours, in the order of the parts.
        groups: how often the parts repeat.
        counts: blocks of each part in one group.
        width: of a block.
    """

    modules: tuple[str, ...]
    groups: int
    counts: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Names:
    """What the tensors of a family are called.

    Attributes:
        modules: ours to theirs; modules that a model does not have are left out of its table.
        base: the prefix that checkpoints of the bare model lack.
        fused: theirs to how it is made of ours.
        bare: modules of ours whose tensor has the name of the module, and is stored as here, with all experts in it.
        out_last: whether kernels in layers are stored [in, out] like ours (GPT-2).
        within: how a model that this one is a part of calls its tensors: for each way to save it, what they begin with
            here to what they begin with there.
    """

    modules: Mapping[str, str]
    base: str
    fused: Mapping[str, Callable[[DecoderConfig], Fused]] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()
    out_last: bool = False
    within: tuple[Mapping[str, str], ...] = ()

    def module(self, ours: str) -> str:
        """What one of our modules is called; a head that classifies is called alike in every family."""
        return CLASSIFIER if ours == CLASSIFIER else self.modules[ours]

    def spellings(self, full: str) -> Iterator[str]:
        """What a checkpoint may call a tensor: its full name, that in the bare model, those in a larger model."""
        yield full
        yield full.removeprefix(f"{self.base}.")
        for prefixes in self.within:
            yield from (theirs + full.removeprefix(ours) for ours, theirs in prefixes.items() if full.startswith(ours))


@dataclass(frozen=True)
class RopeKeys:
    """How a family's configs spell rotary positions in the keys of transformers 4.

    Attributes:
        kind: the key of `rope_scaling` that names the kind of scaling.
        aliases: further settings that hold `rope_theta` or `partial_rotary_factor`: ours to theirs.
    """

    kind: str = "rope_type"
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers that the decoder covers.

    Attributes:
        model_type: as in `config.json`.
        read: the settings of a config to the options of a decoder. Whatever it asks `Settings` for is honoured.
        irrelevant: settings of this family that do not matter to the logits.
        names: what the tensors are called; a function where that depends on the decoder.
        example: the smallest config that has what makes the family; other settings are their defaults.
        variants: changes of the example, each of which asks for another computation: what is often forgotten.
        rope_keys: how configs spell rotary positions.
        flax_honours: a setting that is refused when it is set, and that the Flax class of transformers honours.
        restarts_separate: whether its PyTorch class tells texts of a row apart by positions that begin anew, where it
            is given no mask and keeps no cache.
        unnamed_settings: what the model reads though its config class does not name it, with the default.
        packed: kinds of quantisation whose weights are unpacked when they are read.
        part_of: model types with images or sound whose text part this is, to the setting that holds its config.

    Example and variants are what the tests compare with PyTorch, load and export.
    """

    model_type: str
    read: Callable[[Settings], Options]
    names: Names | Callable[[DecoderConfig], Names]
    example: HfConfig
    variants: tuple[HfConfig, ...] = ()
    irrelevant: frozenset[str] = frozenset()
    rope_keys: RopeKeys = RopeKeys()
    flax_honours: str | None = None
    restarts_separate: bool = True
    unnamed_settings: Mapping[str, Any] = field(default_factory=dict)
    packed: frozenset[str] = frozenset()
    part_of: Mapping[str, str] = field(default_factory=dict)


def in_layers(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """The names of one layer as names of all layers.

    >>> in_layers("model.layers", {"mlp/up": "mlp.up_proj"})
    {'layers/mlp/up': 'model.layers.{layer}.mlp.up_proj'}
    """
    return {f"layers/{ours}": f"{prefix}.{{layer}}.{theirs}" for ours, theirs in names.items()}


_QKV = ("layers/attention/q", "layers/attention/k", "layers/attention/v")


def qkv_by_head(c: DecoderConfig) -> Fused:
    """Each head's query, key and value after one another."""
    return Fused(_QKV, c.heads, (1, 1, 1), c.head_dim)


def qkv_by_kind(c: DecoderConfig) -> Fused:
    """All queries, then all keys, then all values."""
    return Fused(_QKV, 1, (c.heads, c.kv_heads, c.kv_heads), c.head_dim)


def qkv_by_group(c: DecoderConfig) -> Fused:
    """For each key head the queries that share it, then the key, then the value."""
    return Fused(_QKV, c.kv_heads, (c.heads // c.kv_heads, 1, 1), c.head_dim)


def gate_then_up(c: DecoderConfig) -> Fused:
    """The gate of the MLP, then its other input projection."""
    return Fused(("layers/mlp/gate", "layers/mlp/up"), 1, (1, 1), c.mlp_width)
