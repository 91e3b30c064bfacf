"""An adapter as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.

A module of PyTorch has the factors `lora_A` [r, in] and `lora_B` [out, r]. Where it holds several of our weights in one
(queries, keys and values), their factors stand side by side: it has as many rows of A as they have together.
(Layout: peft 0.21, `tuners/lora` and `utils/save_and_load.py`.)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.merging import whole_path
from redco_cli.adapters.model import Adapter
from redco_cli.adapters.peft import read_peft, stores_inputs_first
from redco_cli.adapters.stored import CONFIG, PREFIX, WEIGHTS
from redco_cli.errors import ModelError
from redco_cli.exporting.check import TOLERANCE
from redco_cli.exporting.export import Exported, write_whole
from redco_cli.exporting.files import write_tokenizer
from redco_cli.exporting.saved_modules import modules_of, saved_tensors, tied_head
from redco_cli.exporting.tensors import Model, Tensor, fetched
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.example_inputs import example_inputs
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.weights.files import SAFETENSORS, Array
from redco_cli.models.weights.table import Row, tensor_table
from redco_cli.plugin.contract import Params

_TASKS = {"causal_lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
_HEADED = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}
"""Tasks for which PEFT expects the head among the modules that are saved whole."""


@dataclass(frozen=True)
class _Module:
    """A module of PyTorch with its adapter.

    Attributes:
        name: of the module.
        rank: rows of A.
        scale: by which its path is multiplied.
        tensors: by what stands behind the name of the module.
    """

    name: str
    rank: int
    scale: float
    tensors: dict[str, Array] = field(repr=False)


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
    factors = {path: _joined(one) for path, one in adapter.factors(own).items()}
    modules = _of_decoder(adapter, factors, model) if isinstance(model, DecoderModel) else _of_flax(adapter, factors)
    tensors = {f"{PREFIX}{one.name}{suffix}": array for one in modules for suffix, array in one.tensors.items()}
    saved = saved_tensors(adapter, factors, base, model)
    tensors |= {f"{PREFIX}{path}": array for path, array in saved.items()}
    return {CONFIG: _config(adapter, modules, sorted(saved), model, name), WEIGHTS: tensors}


def _joined(factors: Mapping[str, Any]) -> dict[str, Any]:
    """With one A and one B, whatever the path began with: PEFT adds them to the weights as they were."""
    kept = {name: array for name, array in factors.items() if not name.startswith("initial_")}
    return {**kept, **dict(zip("AB", whole_path(factors), strict=True))} if "A" in factors else kept


def export_adapter(
    adapter: Adapter,
    own: Params,
    base: Params,
    model: Model,
    directory: Path,
    *,
    name: str | None,
    tokenizer: Any = None,
) -> Exported:
    """Writes an adapter as PEFT does, and proves it: what is read from there computes the same logits.

    Args:
        adapter: which weights are adapted.
        own: its parameters.
        base: those of the model.
        model: a named one.
        directory: a new or empty one.
        name: of the base model, for those who load it.
        tokenizer: to save beside it.

    Raises:
        StorageError: the directory is not empty, or cannot be written.
        ModelError: PEFT has no form for it, or reading gives other logits.
    """
    if isinstance(model, DiffusionModel):
        problem = f"an adapter of a {model.config.model_type} has no form here that others read"
        raise ModelError("--adapter", problem, "leave it out: the model is exported, merged")
    files = peft_files(adapter, own, base, model, name)
    tensors = [Tensor(key, "float32", one.shape, partial(_itself, one)) for key, one in files[WEIGHTS].items()]

    def describe(made: Path) -> None:
        (made / SAFETENSORS).rename(made / WEIGHTS)
        text = json.dumps(files[CONFIG], indent=2, sort_keys=True)
        (made / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        write_tokenizer(tokenizer, None, made)

    def compare(made: Path) -> float:
        read, again = read_peft(made, model)
        outputs = [_outputs(model, base, *pair) for pair in ((adapter, own), (read, again))]
        difference = max(float(np.abs(one - other).max()) for one, other in zip(*outputs, strict=True))
        if not difference <= TOLERANCE:
            problem = f"what was exported gives other logits than the run: they differ by {difference:.1e}"
            raise ModelError(str(directory), problem, "report this model; redco export without --adapter merges")
        return difference

    return write_whole(tensors, directory.absolute(), "pt", describe, compare)


def _itself(array: Array) -> Array:
    return array


def _outputs(model: Model, base: Params, adapter: Adapter, own: Params) -> list[Array]:
    """What a model gives for made-up inputs with an adapter."""
    inputs = example_inputs(model, jax.device_count())

    def run(base: Params, factors: Any, inputs: Any) -> Any:
        return adapting(lambda params, inputs: model(params, **inputs), adapter.adapters)(base, factors, None, inputs)

    found = jax.tree.leaves(jax.jit(run)(base, adapter.factors(own), inputs))
    return [fetched(leaf.astype("float32"), (), "float32") for leaf in found]


def _of_decoder(adapter: Adapter, factors: Mapping[str, Mapping[str, Any]], model: DecoderModel) -> list[_Module]:
    modules = []
    for row in tensor_table(model.decoder):
        paths = ["/".join(path) for path in row.paths]
        if any(path in adapter.adapters for path in paths):
            for index, tensor in row.tensors():
                modules.append(_module_of(adapter, factors, row, paths, index, tensor.removesuffix(".weight")))
    return modules


def _module_of(
    adapter: Adapter,
    factors: Mapping[str, Mapping[str, Any]],
    row: Row,
    paths: Sequence[str],
    index: tuple[int, ...],
    name: str,
) -> _Module:
    """The adapters of all weights that a tensor holds, as one."""
    adapted = [path for path in paths if path in adapter.adapters]
    if any(len(shape) > 2 for shape in row.shapes):
        problem = (
            f"PyTorch keeps all experts of {', '.join(adapted)} in one tensor, and which factor PEFT takes for the "
            "input's changes with its version and that of transformers"
        )
        raise ModelError("adapter.targets", problem, "adapt other weights, or merge: redco export --merge")
    scale = adapter.adapters[adapted[0]].scale
    if adapter.uses[adapted[0]].kind == "lookup":
        a, b = (fetched(factors[adapted[0]][part], index, "float32") for part in ("A", "B"))
        down, up = {"lora_embedding_A": a.T}, {"lora_embedding_B": b.T}
        return _Module(name, a.shape[1], scale, _behind({**down, **up}))
    downs, ups, magnitudes = [], [], []
    for place, path in enumerate(paths):
        if path not in adapter.adapters:
            continue
        own = {part: fetched(leaf, index, "float32") for part, leaf in factors[path].items()}
        downs.append(own["A"].T)
        ups.append(_out_first(row, place, own["B"] * (adapter.adapters[path].scale / scale)))
        if "magnitude" in own:
            magnitudes.append(_out_first(row, place, own["magnitude"][None])[:, 0])
    if magnitudes and len(adapted) < len(paths):
        left = ", ".join(path for path in paths if path not in adapted)
        problem = f"PyTorch has {', '.join(paths)} in one, and DoRA has a magnitude for each output, but not for {left}"
        raise ModelError("adapter.targets", problem, "adapt all of them, or merge: redco export --merge")
    tensors = {"lora_A.weight": np.concatenate(downs), "lora_B.weight": np.concatenate(ups, axis=1)}
    if magnitudes:
        tensors["lora_magnitude_vector"] = np.sum(magnitudes, axis=0)
    return _Module(name, tensors["lora_A.weight"].shape[0], scale, _behind(tensors))


def _out_first(row: Row, place: int, part: Array) -> Array:
    """A slice [r, out] where it stands in a stored tensor: [out of all, r], zero elsewhere."""
    slices = tuple(
        part if number == place else np.zeros((len(part), shape[-1]), part.dtype)
        for number, shape in enumerate(row.shapes)
    )
    together = row.put_together(slices)
    return together if row.transposed else together.T


def _of_flax(adapter: Adapter, factors: Mapping[str, Mapping[str, Any]]) -> list[_Module]:
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
        modules.append(_Module(name, own["A"].shape[1], how.scale, _behind(tensors)))
    return modules


def _behind(tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {f".{name}": np.ascontiguousarray(array) for name, array in tensors.items()}


def _config(
    adapter: Adapter, modules: Sequence[_Module], saved: Sequence[str], model: Model, name: str | None
) -> dict[str, Any]:
    section = adapter.section
    ranks, scales = Counter(one.rank for one in modules), Counter(one.scale for one in modules)
    rank, scale = (counted.most_common(1)[0][0] if counted else 1 for counted in (ranks, scales))

    def alpha(one: _Module) -> float:
        return one.scale * (math.sqrt(one.rank) if section.rslora else one.rank)

    usual = scale * (math.sqrt(rank) if section.rslora else rank)
    return {
        "peft_type": "LORA",
        "task_type": (_TASKS | (_HEADED if saved else {})).get(str(model.task)),
        "base_model_name_or_path": name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(usual),
        "lora_dropout": section.dropout,
        "use_rslora": section.rslora,
        "use_dora": section.type == "dora",
        "fan_in_fan_out": stores_inputs_first(model),
        "bias": "none",
        "target_modules": _short([one.name for one in modules], _matrices(model)),
        "rank_pattern": {one.name: one.rank for one in modules if one.rank != rank},
        "alpha_pattern": {one.name: _plain(alpha(one)) for one in modules if not math.isclose(alpha(one), usual)},
        "modules_to_save": sorted(modules_of(saved) - {tied_head(model)}) or None,
        "ensure_weight_tying": tied_head(model) in modules_of(saved),
        "init_lora_weights": True,
    }


def _plain(value: float) -> float | int:
    """A whole number where it is one."""
    return round(value) if math.isclose(value, round(value)) else value


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
