"""An adapter alone as a directory that others load, PEFT or diffusers, proved by reading it again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.model import Adapter
from redco_cli.adapters.peft import read_peft
from redco_cli.adapters.stored import CONFIG, WEIGHTS
from redco_cli.errors import ModelError
from redco_cli.exporting.check import TOLERANCE
from redco_cli.exporting.diffusers import STEM, lora_file
from redco_cli.exporting.export import Exported, write_whole
from redco_cli.exporting.files import write_tokenizer
from redco_cli.exporting.peft import peft_files
from redco_cli.exporting.tensors import Model, Tensor, fetched
from redco_cli.models.diffusion.model import AutoencoderModel, UNetModel
from redco_cli.models.example_inputs import example_inputs
from redco_cli.models.weights.files import Array
from redco_cli.plugin.contract import Params


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
    """Writes an adapter as PEFT does, or that of a U-Net as diffusers does, and proves it: what is read from there
    computes the same outputs.

    Args:
        adapter: which weights are adapted.
        own: its parameters.
        base: those of the model.
        model: a named one.
        directory: a new or empty one.
        name: of the base model, for those who load it.
        tokenizer: to save beside it; diffusers' file has none.

    Raises:
        StorageError: the directory is not empty, or cannot be written.
        ModelError: the other library has no form for it, or reading gives other outputs.
    """
    if isinstance(model, AutoencoderModel):
        problem = f"an adapter of a {model.config.model_type} has no form here that others read"
        raise ModelError("--adapter", problem, "leave it out: the model is exported, merged")

    def compare(made: Path) -> float:
        read, again = read_peft(made, model)
        outputs = [_outputs(model, base, *pair) for pair in ((adapter, own), (read, again))]
        difference = max(float(np.abs(one - other).max()) for one, other in zip(*outputs, strict=True))
        if not difference <= TOLERANCE:
            problem = f"what was exported gives other outputs than the run: they differ by {difference:.1e}"
            raise ModelError(str(directory), problem, "report this model; redco export without --adapter merges")
        return difference

    if isinstance(model, UNetModel):
        arrays, header = lora_file(adapter, own, model)
        return write_whole(
            _float32(arrays), directory.absolute(), "pt", lambda made: None, compare, stem=STEM, header=header
        )
    files = peft_files(adapter, own, base, model, name)

    def describe(made: Path) -> None:
        text = json.dumps(files[CONFIG], indent=2, sort_keys=True)
        (made / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        write_tokenizer(tokenizer, None, made)

    stem = Path(WEIGHTS).stem
    return write_whole(_float32(files[WEIGHTS]), directory.absolute(), "pt", describe, compare, stem=stem)


def _float32(arrays: dict[str, Array]) -> list[Tensor]:
    return [Tensor(key, "float32", one.shape, partial(_itself, one)) for key, one in arrays.items()]


def _itself(array: Array) -> Array:
    return array


def _outputs(model: Model, base: Params, adapter: Adapter, own: Params) -> list[Array]:
    """What a model gives for made-up inputs with an adapter."""
    inputs = example_inputs(model, jax.device_count())

    def run(base: Params, factors: Any, inputs: Any) -> Any:
        return adapting(lambda params, inputs: model(params, **inputs), adapter.adapters)(base, factors, None, inputs)

    found = jax.tree.leaves(jax.jit(run)(base, adapter.factors(own), inputs))
    return [fetched(leaf.astype("float32"), (), "float32") for leaf in found]
