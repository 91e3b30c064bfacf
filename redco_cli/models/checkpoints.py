"""Model files on disk, tensor by tensor: safetensors in one file or many, and what Flax saves. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16, which safetensors asks it for)
import numpy as np

from redco_cli.errors import ModelError

SAFETENSORS, FLAX = "model.safetensors", "flax_model.msgpack"
INDEX = "model.safetensors.index.json"
_HOW_TO_CONVERT = (
    "convert it once where torch is installed: AutoModel...from_pretrained(DIR).save_pretrained(DIR) writes safetensors"
)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a saved model.

    Attributes:
        names: whose names the tensors carry: PyTorch's (`h.0.attn.c_attn.weight`) or Flax's (`h.0.attn.c_attn.kernel`).
        shapes: tensor name to shape as stored.
        read: tensor name to its array, in the stored dtype, read when called.
    """

    names: Literal["pytorch", "flax"]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray[Any, Any]]


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in a directory.

    Raises:
        ModelError: there is none that can be read without torch, or a file is missing, truncated or damaged.
    """
    if (directory / SAFETENSORS).is_file():
        return _open_safetensors([directory / SAFETENSORS])
    if (directory / INDEX).is_file():
        return _open_safetensors(sharded_files(directory / INDEX))
    if (directory / FLAX).is_file():
        return _open_msgpack(directory / FLAX)
    if any(directory.glob("*.bin")):
        raise ModelError(str(directory), "the weights are in PyTorch's pickle format (.bin)", _HOW_TO_CONVERT)
    raise ModelError(str(directory), "has no weights", f"it needs {SAFETENSORS}, {INDEX} with its files, or {FLAX}")


def sharded_files(index: Path) -> list[Path]:
    """The files that an index names, each once.

    Raises:
        ModelError: the index is damaged.
    """
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [index.parent / name for name in sorted(set(names))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(str(index), f"the index is damaged: {error!r}", "download or save the model again") from None


def _open_safetensors(files: list[Path]) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    home: dict[str, Any] = {}
    formats = set()
    for file in files:
        try:
            opened = safe_open(file, framework="numpy")
        except FileNotFoundError:
            raise ModelError(str(file), "the file is missing", "download or save the model again") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(
                str(file), f"the file is truncated or damaged: {error}", "download or save the model again"
            ) from None
        formats.add((opened.metadata() or {}).get("format"))
        for name in opened.keys():  # noqa: SIM118  (not a mapping)
            shapes[name] = tuple(opened.get_slice(name).get_shape())
            home[name] = opened
    return Checkpoint("flax" if "flax" in formats else "pytorch", shapes, lambda name: home[name].get_tensor(name))


def _open_msgpack(file: Path) -> Checkpoint:
    from flax.serialization import msgpack_restore
    from flax.traverse_util import flatten_dict

    try:
        tensors = flatten_dict(msgpack_restore(file.read_bytes()), sep=".")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(
            str(file), f"the file is truncated or damaged: {error}", "download or save the model again"
        ) from None
    return Checkpoint("flax", shapes, lambda name: np.asarray(tensors[name]))
