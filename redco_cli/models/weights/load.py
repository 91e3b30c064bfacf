"""From a saved model to parameters on their devices: one tensor at a time, without torch, always float32.

A tensor that is missing, of another shape, or without a place is an error that names it. A head that the checkpoint
lacks as a whole is the exception: it is what fine-tuning is for, is initialised afresh, and is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.config.read import model_directory
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.weights.decoder import decoder_vocabulary, fit_decoder
from redco_cli.models.weights.diffusion import fit_component
from redco_cli.models.weights.files import (
    FLAX,
    INDEX_SUFFIX,
    WEIGHTS,
    Checkpoint,
    open_checkpoint,
    sharded_files,
    weights_file,
)
from redco_cli.models.weights.fit import Fit, check_copies, check_fit
from redco_cli.models.weights.flax import fit_flax, flax_vocabulary
from redco_cli.models.weights.mxfp4 import unpacked
from redco_cli.models.weights.rows import with_rows
from redco_cli.models.weights.shards import fill
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection

Model = HfFlaxModel | DecoderModel | DiffusionModel
Keeping = Callable[[str, jax.Array], Any]
"""What is made of a parameter, given its path, once it is read."""


@dataclass(frozen=True)
class Loaded:
    """Parameters read from a checkpoint.

    Attributes:
        params: as `model.init` returns them, float32.
        fresh: parameters that the checkpoint lacks and that were initialised (`classifier/kernel`).
        unused: stored tensors of another head, by their stored name.
    """

    params: Params
    fresh: tuple[str, ...]
    unused: tuple[str, ...]


def checkpoint_directory(section: ModelSection, *, where: Callable[[str], str]) -> Path:
    """The directory with the weights of `model.name`; those of a hub model are downloaded, or found in its cache.

    Raises:
        ModelError: the hub cannot be reached or has no weights that can be read without torch.
    """
    assert section.name is not None
    directory = model_directory(section)
    if directory is not None:
        return directory
    from transformers.utils import cached_file

    inside = {"subfolder": section.subfolder or "", "revision": section.revision}

    def fetch(file: str) -> Path | None:
        found = cached_file(section.name, file, **inside, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    try:
        for name in WEIGHTS:
            found = fetch(name)
            if found is not None:
                for shard in sharded_files(found) if name.endswith(INDEX_SUFFIX) else ():
                    fetch(str(shard.relative_to(found.parent)))
                return found.parent
    except OSError as error:
        raise ModelError(
            where("model.name"), f"the weights of {section.name} cannot be fetched: {error}", "check the network"
        ) from None
    raise ModelError(
        where("model.name"),
        f"{section.name} has no safetensors or Flax weights",
        "choose another revision, or convert it once where torch is installed (save_pretrained writes safetensors)",
    )


def load_params(
    model: Model,
    directory: Path,
    shardings: Params | None = None,
    *,
    rng: Any = None,
    keeping: Keeping = lambda _, leaf: leaf,
) -> Loaded:
    """Reads a checkpoint: each parameter is placed on its devices, piece by piece, before the next one is read.

    Beyond this process's shards the host holds less than 2 GiB, whatever the size of the model.

    Args:
        model: the model.
        directory: where its weights are (`checkpoint_directory`).
        shardings: a sharding for each parameter, in the tree of `model.abstract`; None for the default device.
        rng: key for a head that the checkpoint lacks; None refuses such a checkpoint.
        keeping: what is made of each parameter, given its path, before the next one is read; default: nothing else.

    Raises:
        ModelError: the checkpoint does not fit the model, or is damaged.
    """
    checkpoint = _open(model, directory)
    fit = _fit(model, checkpoint)
    check_fit(fit, directory, may_lack_head=rng is not None)
    check_copies(fit, checkpoint, directory)
    flat_shardings = flatten_dict(shardings) if shardings is not None else {}
    params = {
        path: keeping("/".join(path), fill(source, flat_shardings.get(path))) for path, source in fit.sources.items()
    }
    fresh = _initialise(model, fit.fresh, rng, flat_shardings)
    params |= {path: keeping("/".join(path), leaf) for path, leaf in fresh.items()}
    return Loaded(
        unflatten_dict({path: params[path] for path in flatten_dict(model.abstract)}),
        tuple("/".join(path) for path in fit.fresh),
        fit.unused,
    )


def check_checkpoint(model: Model, directory: Path) -> None:
    """What `load_params` with a key would refuse, found in the headers of safetensors; Flax's own files have none.

    That a tensor stored under two names is the same under both is seen only when it is read.

    Raises:
        ModelError: the checkpoint does not fit the model, is cut off, or is not there.
    """
    if weights_file(directory) != FLAX:
        check_fit(_fit(model, _open(model, directory)), directory, may_lack_head=True)


def _open(model: Model, directory: Path) -> Checkpoint:
    """The checkpoint in a directory, with rows for the tokens that the recipe adds."""
    checkpoint = open_checkpoint(directory)
    if isinstance(model, DecoderModel):
        checkpoint = unpacked(checkpoint)
    if model.added is None or isinstance(model, DiffusionModel):
        return checkpoint
    if isinstance(model, DecoderModel):
        return with_rows(checkpoint, model.added, decoder_vocabulary(model, checkpoint))
    return with_rows(checkpoint, model.added, flax_vocabulary(model, checkpoint))


def _fit(model: Model, checkpoint: Checkpoint) -> Fit:
    if isinstance(model, DiffusionModel):
        return fit_component(model, checkpoint)
    return fit_decoder(model, checkpoint) if isinstance(model, DecoderModel) else fit_flax(model, checkpoint)


def _initialise(
    model: Model, fresh: tuple[Any, ...], rng: Any, shardings: dict[tuple[str, ...], Any]
) -> dict[tuple[str, ...], jax.Array]:
    """Fresh values of the paths `fresh` alone: what the rest of `init` would compute is never computed."""
    if not fresh:
        return {}

    def born(key: Any) -> dict[tuple[str, ...], Any]:
        params = flatten_dict(model.init(key))
        return {path: params[path] for path in fresh}

    where = {path: shardings[path] for path in fresh} if shardings else None
    made: dict[tuple[str, ...], jax.Array] = jax.jit(born, out_shardings=where)(rng)
    return made
