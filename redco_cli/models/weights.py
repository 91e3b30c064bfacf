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
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.errors import ModelError, Problem
from redco_cli.models.checkpoints import FLAX, INDEX, SAFETENSORS, Checkpoint, open_checkpoint, sharded_files
from redco_cli.models.configs import local_directory
from redco_cli.models.hf_flax import HfFlaxModel
from redco_cli.models.naming import Placement, lacking_heads, place_tensors
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection

_SHOWN = 5


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
    directory = local_directory(section.name)
    if directory is not None:
        return directory
    from transformers.utils import cached_file

    def fetch(file: str) -> Path | None:
        found = cached_file(section.name, file, revision=section.revision, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    try:
        for name in (SAFETENSORS, INDEX, FLAX):
            found = fetch(name)
            if found is not None:
                for shard in sharded_files(found) if name == INDEX else ():
                    fetch(shard.name)
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


def load_params(model: HfFlaxModel, directory: Path, shardings: Params | None = None, *, rng: Any = None) -> Loaded:
    """Reads a checkpoint: each tensor is placed on its devices before the next one is read.

    Args:
        model: the model.
        directory: where its weights are (`checkpoint_directory`).
        shardings: a sharding for each parameter, in the tree of `model.abstract`; None for the default device.
        rng: key for a head that the checkpoint lacks; None refuses such a checkpoint.

    Raises:
        ModelError: the checkpoint does not fit the model, or is damaged.
    """
    checkpoint, placement, fresh = _open(model, directory, may_lack_head=rng is not None)
    abstract = flatten_dict(model.abstract)
    flat_shardings = flatten_dict(shardings) if shardings is not None else {}
    params = {}
    for path, (name, order) in placement.sources.items():
        tensor = checkpoint.read(name)
        params[path] = _place(tensor if order is None else tensor.transpose(order), flat_shardings.get(path))
    params |= _initialise(model, fresh, rng, flat_shardings)
    return Loaded(
        unflatten_dict({path: params[path] for path in abstract}),
        tuple("/".join(path) for path in fresh),
        placement.unused,
    )


def check_checkpoint(model: HfFlaxModel, directory: Path) -> None:
    """What `load_params` with a key would refuse, found in the headers of safetensors; Flax's own files have none.

    Raises:
        ModelError: the checkpoint does not fit the model, is cut off, or is not there.
    """
    if not (directory / FLAX).is_file():
        _open(model, directory, may_lack_head=True)


def _open(
    model: HfFlaxModel, directory: Path, *, may_lack_head: bool
) -> tuple[Checkpoint, Placement, tuple[tuple[str, ...], ...]]:
    """A checkpoint that fits the model, where its tensors go, and the paths of a head that it lacks."""
    checkpoint = open_checkpoint(directory)
    abstract = flatten_dict(model.abstract)
    placement = place_tensors(
        checkpoint.shapes, abstract, model.flax.base_model_prefix, tied_shape=_tied_shape(model, abstract)
    )
    fresh = lacking_heads(placement, abstract, model.flax.base_model_prefix)
    _check(model, directory, checkpoint, placement, fresh if may_lack_head else ())
    return checkpoint, placement, fresh


def _tied_shape(model: HfFlaxModel, abstract: dict[tuple[str, ...], Any]) -> tuple[int, ...] | None:
    """The shape of the word embedding when the output layer is the same tensor."""
    text_config = model.config.get_text_config(decoder=True)
    vocab_size = getattr(text_config, "vocab_size", None)
    if vocab_size is None or not text_config.tie_word_embeddings:
        return None
    shapes = [leaf.shape for path, leaf in abstract.items() if path[-1] == "embedding" and leaf.shape[0] == vocab_size]
    return shapes[0] if shapes else None


def _check(
    model: HfFlaxModel, directory: Path, checkpoint: Checkpoint, placement: Placement, fresh: tuple[Any, ...]
) -> None:
    """Reports every kind of misfit at once, a few names of each."""
    abstract = flatten_dict(model.abstract)
    wrong = []
    for path, (name, order) in placement.sources.items():
        stored = checkpoint.shapes[name]
        shape = stored if order is None else tuple(stored[dim] for dim in order)
        if shape != abstract[path].shape:
            wrong.append(f"{name} {list(stored)} for {'/'.join(path)} {list(abstract[path].shape)}")
    missing = ["/".join(path) for path in placement.missing if path not in fresh]
    kinds = (
        ("tensors of another shape than the config says", wrong, "the checkpoint and config.json do not fit"),
        ("parameters that the checkpoint lacks", missing, "choose a checkpoint for this model.task"),
        ("tensors that the model has no place for", list(placement.extra), "choose a checkpoint of this model type"),
    )
    problems = [
        Problem(str(directory), f"{len(names)} {kind}: {_some(names)}", remedy)
        for kind, names, remedy in kinds
        if names
    ]
    if problems:
        raise ModelError.of(problems)


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _place(tensor: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    """The tensor on its devices, float32 where it is a floating-point number."""
    if jnp.issubdtype(tensor.dtype, jnp.floating):
        tensor = tensor.astype(np.float32)
    placed: jax.Array = (
        jax.device_put(tensor)
        if sharding is None
        else jax.make_array_from_callback(tensor.shape, sharding, lambda index: tensor[index])
    )
    return placed


def _initialise(
    model: HfFlaxModel, fresh: tuple[Any, ...], rng: Any, shardings: dict[tuple[str, ...], Any]
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
