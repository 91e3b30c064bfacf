"""Where each stored tensor belongs in a Flax parameter tree: PyTorch names renamed, kernels transposed.

PyTorch keeps a linear kernel as [out, in] and a convolution as [out, in, ...space]; Flax as [in, out] and
[...space, in, out]. Both libraries otherwise name the parts of a model alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Path = tuple[str, ...]

_RENAMED = {
    "weight": ("weight", "scale", "embedding", "kernel"),
    "gamma": ("scale", "weight"),
    "beta": ("bias",),
    "running_mean": ("mean",),
    "running_var": ("var",),
}
_IN_PYTORCH = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
_TRANSPOSED = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0)}
"""Number of dims of a kernel to the order of its dims in Flax."""

_COLLECTIONS = ("params", "batch_stats")
_NO_PARAMETER = re.compile(
    r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|inv_freq|relative_position_index|embed_positions(\.weights?)?"
    r"|(attn|crossattention)\.(attention\.)?(bias|masked_bias)"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight)$"
)
"""What PyTorch stores besides parameters: masks, position tables, counters."""
_COPY = re.compile(r"(^|\.)((encoder|decoder)\.embed_tokens\.weight|(predictions|lm_head)\.decoder\.(weight|bias))$")
"""Second names of tied tensors: the word embedding, and the bias of the output layer."""


@dataclass(frozen=True)
class Placement:
    """The part of a checkpoint that a model uses.

    Attributes:
        sources: path in the parameter tree to the stored tensor's name and the order of its dims (None: as stored).
        missing: paths that no tensor fills.
        unused: tensors outside the base model, of another head.
        extra: tensors inside the base model that it has no place for.
        copies: stored tensors that are second names of tied ones, each with the names of those it may be a copy of.
    """

    sources: Mapping[Path, tuple[str, tuple[int, ...] | None]]
    missing: tuple[Path, ...]
    unused: tuple[str, ...]
    extra: tuple[str, ...]
    copies: Mapping[str, tuple[str, ...]]


def place_tensors(
    stored: Mapping[str, tuple[int, ...]], tree: Iterable[Path], base: str, *, tied_shape: tuple[int, ...] | None = None
) -> Placement:
    """Finds the place of every stored tensor.

    Args:
        stored: tensor name (dotted) to shape.
        tree: the paths of the parameters.
        base: name of the base model inside a model with a head (`bert`, `transformer`).
        tied_shape: shape of the word embedding where it is the output layer too: a stored copy of it is no news.
    """
    known = {_without_collection(path): path for path in tree}
    has_base = any(path[0] == base for path in known)
    stores_base = any(name.startswith(f"{base}.") for name in stored)
    sources: dict[Path, tuple[str, tuple[int, ...] | None]] = {}
    unused: list[str] = []
    extra: list[str] = []
    copies: list[str] = []
    for name, shape in stored.items():
        found = _find(tuple(name.split(".")), len(shape), base, known)
        if found is not None:
            sources[found[0]] = (name, found[1])
        elif _NO_PARAMETER.search(name):
            continue
        elif _COPY.search(name):
            copies.append(name)
        elif "pooler" in name or (has_base and stores_base and not name.startswith(f"{base}.")):
            (unused if shape != tied_shape else copies).append(name)
        else:
            extra.append(name)
    missing = tuple(path for path in known.values() if path not in sources)
    copied = {name: _originals(name, stored, sources) for name in copies}
    return Placement(sources, missing, tuple(unused), tuple(extra), {name: of for name, of in copied.items() if of})


def _originals(
    copy: str, stored: Mapping[str, tuple[int, ...]], sources: Mapping[Path, tuple[str, tuple[int, ...] | None]]
) -> tuple[str, ...]:
    """The stored tensors that are in use and that `copy` may be a second name of."""
    embeddings = tuple(
        name for path, (name, _) in sources.items() if path[-1] == "embedding" and stored[name] == stored[copy]
    )
    bias = copy.replace(".decoder.bias", ".bias")
    return embeddings if copy.endswith("weight") else (bias,) if bias in stored and bias != copy else ()


def torch_name(path: Path, dims: int) -> tuple[str, tuple[int, ...] | None]:
    """PyTorch's name of a parameter, and the order of its dims there (None: as they are).

    >>> torch_name(("params", "bert", "pooler", "dense", "kernel"), 2)
    ('bert.pooler.dense.weight', (1, 0))
    """
    *parents, last = _without_collection(path)
    if last in ("weight_g", "weight_v"):
        return ".".join((*parents, "parametrizations.weight", f"original{'gv'.index(last[-1])}")), None
    order = _TRANSPOSED.get(dims) if last == "kernel" else None
    name = ".".join((*parents, _IN_PYTORCH.get(last, last)))
    return name, None if order is None else tuple(order.index(dim) for dim in range(dims))


def lacking_heads(placement: Placement, tree: Iterable[Path], base: str) -> tuple[Path, ...]:
    """Those missing paths that may be born fresh: poolers, and parts outside the base model that lack as a whole."""
    paths = list(tree)
    has_base = any(_without_collection(path)[0] == base for path in paths)
    filled = {_without_collection(path)[0] for path in placement.sources}
    heads = {_without_collection(path)[0] for path in paths} - filled - {base}
    return tuple(
        path for path in placement.missing if "pooler" in path or (has_base and _without_collection(path)[0] in heads)
    )


def _without_collection(path: Path) -> Path:
    return path[1:] if path[0] in _COLLECTIONS else path


def _find(key: Path, dims: int, base: str, known: Mapping[Path, Path]) -> tuple[Path, tuple[int, ...] | None] | None:
    """The path for a PyTorch (or Flax) key and the order of dims, with or without the base model's name before it."""
    *parents, last = key[1:] if key[0] in _COLLECTIONS else key
    if "parametrizations" in parents:  # weight norm: ...parametrizations.weight.original0
        where = parents.index("parametrizations")
        parents, last = parents[:where], f"{parents[where + 1]}_{'g' if last == 'original0' else 'v'}"
    for name in _RENAMED.get(last, (last,)):
        for path in ((*parents, name), (base, *parents, name)):
            if path in known:
                turned = name == "kernel" and last == "weight"
                return known[path], _TRANSPOSED[dims] if turned else None
    return None
