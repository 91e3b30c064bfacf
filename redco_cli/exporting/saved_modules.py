"""Modules that are trained themselves beside an adapter, as PEFT saves them: whole, and tied where the model ties them.

(Layout: peft 0.21, `modules_to_save` and `ensure_weight_tying`.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from redco_cli.adapters.model import Adapter, model_uses
from redco_cli.adapters.uses import Use
from redco_cli.errors import ModelError
from redco_cli.exporting.tensors import Model, fetched
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.families.registry import names_of
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.weights.files import Array
from redco_cli.models.weights.table import tensor_table
from redco_cli.plugin.contract import Params

_TIED_BY_PEFT = ("embed_tokens", "lm_head")
"""Modules that PEFT keeps tied to what they are tied to (`EMBEDDING_LAYER_NAMES`)."""
_KEY = "adapter.modules_to_save"
_MERGE = "merge it: redco export without --adapter"


def saved_tensors(
    adapter: Adapter, factors: Mapping[str, Mapping[str, Any]], base: Params, model: Model
) -> dict[str, Array]:
    """The tensors of the modules that an adapter trains themselves; a module is whole, with a bias that is not trained.

    With several processes all must call it.

    Args:
        adapter: which they are.
        factors: its parameters by path.
        base: those of the model.
        model: a named one.

    Raises:
        ModelError: PEFT has no form for it.
    """
    if not adapter.saved:
        return {}
    known = flatten_dict(base, sep="/")
    if isinstance(model, DecoderModel):
        return _of_decoder(adapter, factors, known, model)
    uses = model_uses(model)
    for path in adapter.saved:
        if len({use.signature for use in uses.get(path, ()) if isinstance(use, Use)}) > 1:
            raise ModelError(_KEY, f"{path} is used in several ways, of which PEFT would train one", _MERGE)
    whole = {path.rpartition("/")[0] for path in adapter.saved}
    found = {}
    for path, leaf in known.items():
        if path.rpartition("/")[0] in whole:
            name, order = torch_name(tuple(path.split("/")), len(leaf.shape))
            array = fetched(factors[path]["whole"] if path in adapter.saved else leaf, (), "float32")
            found[name] = np.ascontiguousarray(array if order is None else array.transpose(order))
    return found


def modules_of(tensors: Collection[str]) -> set[str]:
    """The modules that tensors belong to, by their names."""
    return {name.rpartition(".")[0] for name in tensors}


def tied_head(model: Model) -> str | None:
    """PyTorch's name of the head of a decoder whose embedding it is; None for other models."""
    if not isinstance(model, DecoderModel) or not model.decoder.tied:
        return None
    return names_of(model.decoder).modules.get("head")


def _of_decoder(
    adapter: Adapter, factors: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any], model: DecoderModel
) -> dict[str, Array]:
    """The same of the decoder, whose table says which tensors hold a parameter."""
    rows = [(row, ["/".join(path) for path in row.paths]) for row in tensor_table(model.decoder)]
    modules = modules_of([row.name for row, paths in rows if set(paths) & set(adapter.saved)])
    found = {}
    for row, paths in rows:
        if not modules & modules_of([row.name]):
            continue
        both = [path for path in paths if path in adapter.adapters]
        if both:
            problem = f"PyTorch has {', '.join(paths)} in one, of which {', '.join(both)} would have an adapter too"
            raise ModelError(_KEY, problem, f"train all of them so; or {_MERGE}")
        leaves = [factors[path]["whole"] if path in adapter.saved else known[path] for path in paths]
        for index, name in row.tensors():
            found[name] = row.put_together(tuple(fetched(leaf, index, "float32") for leaf in leaves))
    head, embedding = tied_head(model), names_of(model.decoder).modules["embedding"]
    if head is not None and f"{embedding}.weight" in found:
        if embedding.rpartition(".")[2] not in _TIED_BY_PEFT:
            raise ModelError(_KEY, f"the embedding is the head too, and PEFT ties no {embedding}", _MERGE)
        found[f"{head}.weight"] = found[f"{embedding}.weight"]  # PEFT reads both
    return found
