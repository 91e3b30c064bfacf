"""An adapter as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.

(Layout: peft 0.21, `tuners/lora` and `utils/save_and_load.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from redco_cli.adapters.model import Adapter
from redco_cli.adapters.peft import stores_inputs_first
from redco_cli.adapters.stored import CONFIG, PREFIX, WEIGHTS
from redco_cli.errors import ModelError
from redco_cli.exporting.adapted_modules import Factors, Module, behind, joined_factors, lora_config, module_of
from redco_cli.exporting.saved_modules import modules_of, saved_tensors, tied_head
from redco_cli.exporting.tensors import Model, fetched
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.weights.files import Array
from redco_cli.models.weights.table import Row, tensor_table
from redco_cli.plugin.contract import Params

_TASKS = {"causal_lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
_HEADED = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}
"""Tasks for which PEFT expects the head among the modules that are saved whole."""


def peft_files(adapter: Adapter, own: Params, base: Params, model: Model, name: str | None) -> dict[str, Any]:
    """What PEFT would write: the name of each file to its content, a document or tensors by name.

    With several processes all must call it.

    Args:
        adapter: which weights are adapted.
        own: its parameters.
        base: those of the model.
        model: a named one.
        name: of the base model, for those who load it.

    Raises:
        ModelError: PEFT has no form for it.
    """
    factors = joined_factors(adapter, own)
    modules = _of_decoder(adapter, factors, model) if isinstance(model, DecoderModel) else _of_flax(adapter, factors)
    tensors = {f"{PREFIX}{one.name}{suffix}": array for one in modules for suffix, array in one.tensors.items()}
    saved = saved_tensors(adapter, factors, base, model)
    tensors |= {f"{PREFIX}{path}": array for path, array in saved.items()}
    return {CONFIG: _config(adapter, modules, sorted(saved), model, name), WEIGHTS: tensors}


def _of_decoder(adapter: Adapter, factors: Factors, model: DecoderModel) -> list[Module]:
    modules = []
    for row in tensor_table(model.decoder):
        paths = ["/".join(path) for path in row.paths]
        if any(path in adapter.adapters for path in paths):
            for index, tensor in row.tensors():
                modules.append(_of_row(adapter, factors, row, paths, index, tensor.removesuffix(".weight")))
    return modules


def _of_row(
    adapter: Adapter, factors: Factors, row: Row, paths: Sequence[str], index: tuple[int, ...], name: str
) -> Module:
    adapted = [path for path in paths if path in adapter.adapters]
    if any(len(shape) > 2 for shape in row.shapes):
        problem = (
            f"PyTorch keeps all experts of {', '.join(adapted)} in one tensor, and which factor PEFT takes for the "
            "input's changes with its version and that of transformers"
        )
        raise ModelError("adapter.targets", problem, "adapt other weights, or merge: redco export --merge")
    if adapter.uses[adapted[0]].kind == "lookup":
        a, b = (fetched(factors[adapted[0]][part], index, "float32") for part in ("A", "B"))
        down, up = {"lora_embedding_A": a.T}, {"lora_embedding_B": b.T}
        return Module(name, a.shape[1], adapter.adapters[adapted[0]].scale, behind({**down, **up}))
    return module_of(adapter, factors, paths, index, name, partial(_out_first, row))


def _out_first(row: Row, place: int, part: Array) -> Array:
    """A slice [r, out] where it stands in a stored tensor: [out of all, r], zero elsewhere."""
    slices = tuple(
        part if number == place else np.zeros((len(part), shape[-1]), part.dtype)
        for number, shape in enumerate(row.shapes)
    )
    together = row.put_together(slices)
    return together if row.transposed else together.T


def _of_flax(adapter: Adapter, factors: Factors) -> list[Module]:
    modules = []
    for path, how in adapter.adapters.items():
        name = torch_name(tuple(path.split("/")), 2)[0].removesuffix(".weight")
        own = {part: fetched(leaf, (), "float32") for part, leaf in factors[path].items()}
        if adapter.uses[path].kind == "lookup":
            tensors = {"lora_embedding_A": own["A"].T, "lora_embedding_B": own["B"].T}
        else:
            tensors = {"lora_A.weight": own["A"].T, "lora_B.weight": own["B"].T}
        if "magnitude" in own:
            tensors["lora_magnitude_vector"] = own["magnitude"]
        modules.append(Module(name, own["A"].shape[1], how.scale, behind(tensors)))
    return modules


def _config(
    adapter: Adapter, modules: Sequence[Module], saved: Sequence[str], model: Model, name: str | None
) -> dict[str, Any]:
    return {
        **lora_config(adapter, modules),
        "task_type": (_TASKS | (_HEADED if saved else {})).get(str(model.task)),
        "base_model_name_or_path": name,
        "fan_in_fan_out": stores_inputs_first(model),
        "target_modules": _short([one.name for one in modules], _matrices(model)),
        "modules_to_save": sorted(modules_of(saved) - {tied_head(model)}) or None,
        "ensure_weight_tying": tied_head(model) in modules_of(saved),
    }


def _matrices(model: Model) -> list[str]:
    """The modules of PyTorch whose weight has two dims."""
    if isinstance(model, DecoderModel):
        names = [name for row in tensor_table(model.decoder) if len(row.stored_shape) == 2 for _, name in row.tensors()]
    else:
        flat = flatten_dict(model.abstract)
        names = [torch_name(path, 2)[0] for path, leaf in flat.items() if len(leaf.shape) == 2]
    return [name.removesuffix(".weight") for name in names]


def _short(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Modules by their last word, which is how PEFT finds them in all layers; in full where others have it too."""
    others = {name.rpartition(".")[2] for name in set(known) - set(names)}
    return sorted({name if (last := name.rpartition(".")[2]) in others else last for name in names})
