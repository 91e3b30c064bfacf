"""Shardings by hand, in the way of Megatron-LM: what derived ones are measured against.

A table gives, per pattern of a parameter's path, one mark for each of its dims where the parameter is used:

    `None`      whole
    `"t"`       over `tensor` when the size divides
    `n`         over `tensor` when n divides: n heads, whatever their size
    `"u"`       over `tensor` though it does not divide
    `"."`       whole, and not over `fsdp` either: the dim of stacked layers

Where it lives is the same, and for a weight of two dims or more the largest free dim that divides goes over `fsdp`.
A variant changes some entries of the table; one with `stored` entries keeps parameters elsewhere than where it uses
them. A pattern matches at the end of a path. A variant that is no `reference` leaves whole what Megatron would split:
on toy sizes that can move less, but it divides no memory, so nothing is measured against it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_cli.sharding.decide.guards import REFUSE_ABOVE
from tests.sharding.programs.catalogue import FAMILIES, OURS, program

Marks = tuple[Any, ...]
Table = dict[str, Marks]
T, X = "t", None
COLUMN, ROW, WHOLE = (X, T), (T, X), (X, X)


@dataclass(frozen=True)
class Variant:
    """One way to shard a program.

    Attributes:
        used: pattern to marks.
        stored: the same, where a parameter lives elsewhere.
        reference: whether derived shardings are measured against it.
    """

    used: Table
    stored: Table = field(default_factory=dict)
    reference: bool = True


@dataclass(frozen=True)
class Placed:
    """A variant on a mesh.

    Attributes:
        specs: like the parameters, a `PartitionSpec` each: where it lives.
        gathered: the same: where it is used.
        reference: as in `Variant`.
    """

    specs: Any
    gathered: Any
    reference: bool


def variants(name: str, mesh: Mapping[str, int]) -> dict[str, Placed]:
    """The hand-written shardings of a program.

    Args:
        name: of the program.
        mesh: axis to size.

    Returns:
        By name of the variant.
    """
    params = program(name).params
    return {
        variant: Placed(
            place(params, one.used, one.stored, mesh),
            place(params, one.used, {}, mesh, fsdp=False),
            one.reference,
        )
        for variant, one in _variants(name).items()
    }


def share(params: Any, specs: Any, mesh: Mapping[str, int]) -> float:
    """The share of the parameters' bytes that one device holds."""

    def held(leaf: Any, spec: PartitionSpec) -> float:
        ways = math.prod(mesh[axis] for axis in jax.tree.leaves(tuple(spec)))
        return math.prod(leaf.shape) * leaf.dtype.itemsize / ways

    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)]
    return sum(jax.tree.leaves(jax.tree.map(held, params, specs))) / sum(sizes)


def whole(params: Any, specs: Any, axis: str) -> float:
    """The share of the parameters' bytes that are in arrays which an axis does not split."""

    def bytes_of(leaf: Any) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize

    def left(leaf: Any, spec: PartitionSpec) -> int:
        return 0 if axis in jax.tree.leaves(tuple(spec)) else bytes_of(leaf)

    return sum(jax.tree.leaves(jax.tree.map(left, params, specs))) / sum(map(bytes_of, jax.tree.leaves(params)))


def references(name: str, mesh: Mapping[str, int]) -> dict[str, Placed]:
    """The variants that derived shardings are measured against.

    What moves least is to split nothing: a variant that the guards would refuse counts only where each of them is one.
    """
    params = program(name).params
    found = {variant: placed for variant, placed in variants(name, mesh).items() if placed.reference}
    split = {variant: one for variant, one in found.items() if whole(params, one.specs, "tensor") <= REFUSE_ABOVE}
    return split or found


def place(params: Any, used: Table, stored: Table, mesh: Mapping[str, int], *, fsdp: bool = True) -> Any:
    """A `PartitionSpec` for each parameter by a table: where it lives, or without `fsdp` where it is used."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        marks = _lookup(stored, name) or _lookup(used, name) or (None,) * len(leaf.shape)
        assert len(marks) == len(leaf.shape), f"{name} {leaf.shape}: {marks}"
        axes = [_axis(mark, size, mesh["tensor"]) for mark, size in zip(marks, leaf.shape, strict=True)]
        if fsdp and mesh["fsdp"] > 1 and len(leaf.shape) >= 2:
            free = [
                dim
                for dim, size in enumerate(leaf.shape)
                if axes[dim] is None and marks[dim] != "." and size % mesh["fsdp"] == 0
            ]
            if free:
                axes[max(free, key=lambda dim: leaf.shape[dim])] = "fsdp"
        return PartitionSpec(*axes)

    return jax.tree_util.tree_map_with_path(spec, params)


def _lookup(table: Table, name: str) -> Marks | None:
    return next((marks for pattern, marks in table.items() if re.search(rf"(?:^|/)(?:{pattern})$", name)), None)


def _axis(mark: Any, size: int, tensor: int) -> str | None:
    divides = {"t": size % tensor == 0, "u": True}.get(mark, isinstance(mark, int) and mark % tensor == 0)
    return "tensor" if divides and tensor > 1 else None


# Hugging Face's Flax classes. A kernel is [in, out], but in GPT-2 [out, in].

_ALL_COLUMNS = (
    "[qkv]_proj|query|key|value|[qkv]_lin|(?:SelfAttention|EncDecAttention|LocalSelfAttention)/[qkv]|wi(?:_[01])?|fc1"
    "|fc_in|dense_h_to_4h|gate_proj|up_proj|intermediate/dense|ffn|lin1|intermediate_dense|query_key_value|c_fc"
)
_ALL_ROWS = (
    "out_proj|o_proj|output/dense|out_lin|o|wo|fc2|fc_out|dense_4h_to_h|down_proj|ffn_output|attention/dense"
    "|self_attention/dense|lin2|output_dense|c_proj"
)
_TRANSFORMER: Table = {
    f"(?:{_ALL_COLUMNS})/kernel": COLUMN,
    f"(?:{_ALL_COLUMNS})/bias": (T,),
    f"(?:{_ALL_ROWS})/kernel": ROW,
    "(?:word_embeddings|shared|wte|embed_tokens|token_embedding)/embedding": ROW,
    "lm_head/kernel": COLUMN,
    "(?:lm_head|predictions|generator_lm_head|vocab_projector)/bias": (T,),
    "final_logits_bias": (X, T),
    "relative_attention_bias/embedding": (X, T),
}
_GPT2: Table = {
    "(?:c_fc|q_attn)/kernel": (T, X),
    "q_attn/bias": (T,),
    "c_proj/kernel": (X, T),
}
_FUSED_GPT2: Table = {"c_attn/kernel": (T, X), "c_attn/bias": (T,)}
_WHOLE_GPT2: Table = {"c_attn/kernel": (X, X), "c_attn/bias": (X,)}
_WITH_GPT2 = ("gpt2", "gpt-sw3", "encoder-decoder", "vision-encoder-decoder")


def _kv(heads: int) -> Table:
    return {"[kv]_proj/kernel": (X, heads)}


def _family(name: str) -> dict[str, Variant]:
    family = name.partition(":")[0]
    if family in _WITH_GPT2:
        table = {**_GPT2, **_TRANSFORMER}
        whole = {**_WHOLE_GPT2, **table}
        return {
            "contiguous": Variant({**_FUSED_GPT2, **table}),
            "whole": Variant(whole, reference=False),
            "gathered": Variant(whole, _FUSED_GPT2),
            "attention whole": Variant({"(?:attn|crossattention)/c_proj/kernel": WHOLE, **whole}, reference=False),
        }
    if family in ("mistral", "gemma"):
        heads = 2 if family == "mistral" else 1
        return {"kv by heads": Variant({**_kv(heads), **_TRANSFORMER}), "kv inside heads": Variant(_TRANSFORMER)}
    if family == "resnet":
        stored: Table = {"classifier/.*kernel": (X, T), "kernel": (X, X, X, T)}
        return {"whole": Variant({}, reference=False), "gathered": Variant({}, stored)}
    if family == "regnet":
        shortcuts: Table = {"stages/1/.*shortcut/convolution/kernel": (X, X, X, T)}
        return {"pairs": Variant(_REGNET), "pairs and shortcuts": Variant({**_REGNET, **shortcuts})}
    return {"megatron": Variant(_TRANSFORMER)}


_REGNET: Table = {
    "layer/[01]/convolution/kernel": (X, X, X, T),
    "layer/[01]/normalization/(?:scale|bias|mean|var)": (T,),
    "layer/2/attention/0/kernel": (X, X, T, X),
    "layer/2/attention/2/kernel": (X, X, X, T),
    "layer/2/attention/2/bias": (T,),
    "layer/3/convolution/kernel": (X, X, T, X),
}
"""Each block as a pair: from its first convolution to its last, the channels are those of groups."""

# Our decoder: layers are stacked, a kernel is [layers, in, out], experts are [layers, experts, in, out].

_OURS: Table = {
    "final_norm/(?:scale|bias)": (X,),
    "(?:q|gate|up)/kernel": (".", X, T),
    "(?:q|up)/bias": (".", T),
    "(?:o|down)/kernel": (".", T, X),
    "(?:scale|norm/bias|o/bias|down/bias)": (".", X),
    "experts/(?:gate|up|down)": (".", T, X, X),
    "router/kernel": (".", X, X),
    "embedding": ROW,
    "head": COLUMN,
}
_OUR_COLUMNS: Table = {"experts/(?:gate|up)": (".", X, X, T), "experts/down": (".", X, T, X)}


def _ours(name: str) -> dict[str, Variant]:
    config = OURS[name]
    heads = config.get("num_key_value_heads", config.get("n_head"))
    by_heads: Table = {"[kv]/kernel": (".", X, heads), "[kv]/bias": (".", heads), **_OURS}
    inside: Table = {"[kv]/kernel": (".", X, T), "[kv]/bias": (".", T), **_OURS}
    found = {"kv by heads": Variant(by_heads), "kv inside heads": Variant(inside)}
    if "num_local_experts" in config:
        found["columns of experts"] = Variant({**_OUR_COLUMNS, **by_heads})
    return found


# The small programs, by their scrambled names.

_MLP: Table = {"wa": COLUMN, "wb": (T,), "wc": ROW}
_GATED: Table = {"ka": COLUMN, "kb": COLUMN, "kc": ROW}
_QKVO: Table = {"ra|rb|rc": COLUMN, "rao|rbo|rco": (T,), "rd": ROW}
_VOCABULARY: Table = {"ea": ROW, "ed": COLUMN}
_DECODER: Table = {**_GATED, **_QKVO, **_VOCABULARY}
_STACKED: Table = {
    pattern: (".", *marks) if pattern not in _VOCABULARY else marks for pattern, marks in _DECODER.items()
} | {"nn/z[uo]": (".", X)}
_EXPERTS: Table = {"g[bc]": (T, X, X)}


def _small(name: str) -> dict[str, Variant]:
    if name.startswith("gqa-"):
        return _gqa(int(name.split("-")[1]))
    if name.startswith("decoder-97"):
        return _uneven("ed" if name == "decoder-97" else "")
    if name.startswith("decoder-scan"):
        return {"megatron": Variant(_STACKED)}
    if name.startswith("decoder"):
        return {"megatron": Variant(_DECODER)}
    if name in ("attention-thirds", "attention-3hp-flat"):
        return _fused({"ra": COLUMN, "rb": (T,)}, {"rd": ROW}, {"rd": WHOLE})
    if name == "attention-3hp":
        return {
            "heads": Variant({"ra": (X, X, T, X), "rb": (X, T, X), "rd": ROW}),
            "whole": Variant({"rd": ROW}, reference=False),
            "gathered": Variant({"rd": ROW}, {"ra": (X, X, T, X), "rb": (X, T, X)}),
            "attention whole": Variant({}, reference=False),
        }
    if name == "gated-halves":
        return _fused({"ka": COLUMN}, {"kc": ROW}, {"kc": WHOLE})
    if name == "ssm":
        inner = {"sb": (X, X, T), "s[cd]": (T,), "se": ROW}
        return _fused({"sa": COLUMN}, inner, {})
    return {variant: Variant(table, reference=variant != "whole") for variant, table in _PLAIN[name].items()}


def _fused(fused: Table, rest: Table, rest_whole: Table) -> dict[str, Variant]:
    """The ways with a kernel that is cut in parts: cut though sharded; whole at use; kept sharded, whole at use."""
    return {
        "contiguous": Variant({**fused, **rest}),
        "whole": Variant(rest, reference=False),
        "gathered": Variant(rest, fused),
        "all whole": Variant(rest_whole, reference=False),
    }


def _gqa(heads: int) -> dict[str, Variant]:
    q: Table = {"ra": COLUMN, "rd": ROW}
    return {
        "kv by heads": Variant({**q, "rb|rc": (X, heads)}),
        "kv inside heads": Variant({**q, "rb|rc": COLUMN}),
        "kv gathered": Variant({**q, "rb|rc": (X, heads)}, {"rb|rc": COLUMN}),
        "all whole": Variant({}, reference=False),
    }


def _uneven(head: str) -> dict[str, Variant]:
    """A vocabulary that does not divide: ways to store and to use the embedding and the head."""
    hidden: Table = {"ea": (X, T)} | ({"ed": (T, X)} if head else {})
    uneven: Table = {"ea": ("u", X)} | ({"ed": (X, "u")} if head else {})
    layers = {**_GATED, **_QKVO}
    found = {
        "whole": Variant(layers, reference=False),
        "hidden": Variant({**layers, **hidden}),
        "hidden, uneven at use": Variant({**layers, **uneven}, hidden),
        "hidden, whole at use": Variant(layers, hidden),
    }
    if head:
        found["head uneven at use"] = Variant({**layers, "ed": (X, "u")}, hidden)
        found["embedding hidden, head uneven"] = Variant({**layers, "ea": (X, T), "ed": (X, "u")}, hidden)
    return found


_PLAIN: dict[str, dict[str, Table]] = {
    "mlp-chain": {"megatron": {"ab[02]": COLUMN, "ba[02]": (T,), "ab[13]": ROW}},
    "mlp-residual": {"megatron": _MLP},
    "mlp-transposed": {"megatron": {"wa": ROW, "wb": (T,), "wc": COLUMN}},
    "gated-separate": {"megatron": _GATED},
    "gated-2f": {"megatron": {"ka": (X, X, T), "kc": ROW}, "whole": {"kc": ROW}},
    "gated-interleaved": {"megatron": _GATED},
    "gated-strided": {"megatron": {"ka": COLUMN, "kb": (T,), "kc": ROW}},
    "modulated": {"vector": {**_MLP, "mb": COLUMN, "mc": ROW}, "before it": {**_MLP, "ma": COLUMN, "mb": ROW}},
    "modulated-apart": {"rows": {**_MLP, "mc": (T, X, X)}, "columns": {**_MLP, "mc": (X, X, T)}, "whole": _MLP},
    "attention-flat": {"megatron": _QKVO},
    "attention-general": {"megatron": {"ra|rb|rc": (X, T, X), "rd": (T, X, X)}},
    "attention-h3p": {"megatron": {"ra": COLUMN, "rb": (T,), "rd": ROW}},
    "attention-transposed": {"megatron": {"ra|rb|rc": ROW, "rd": COLUMN}},
    "parallel-block": {"megatron": {**_QKVO, **_MLP}},
    "moe-dense": {
        "experts": _EXPERTS,
        "columns": {"gb": (X, X, T), "gc": (X, T, X)},
        "gate": {"ga": COLUMN, **_EXPERTS},
    },
    "moe-capacity": {
        "experts": _EXPERTS,
        "columns": {"gb": (X, X, T), "gc": (X, T, X)},
        "gate": {"ga": COLUMN, **_EXPERTS},
    },
    "lora": {"megatron": {**_MLP, "tb": COLUMN, "tc": ROW}},
    "bottleneck": {"megatron": _MLP, "whole": {}},
    "conv-net": {
        "pair": {"ca": (X, X, X, T), "cao": (T,), "cb": (X, X, T, X)},
        "channels": {"cb": (X, X, X, T), "cbo": (T,)},
        "whole": {},
    },
    "teacher-student": {"megatron": _MLP},
}


def _variants(name: str) -> dict[str, Variant]:
    if name in OURS:
        return _ours(name)
    return _family(name) if name.partition(":")[0] in FAMILIES else _small(name)
