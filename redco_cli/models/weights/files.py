"""Model files on disk, tensor by tensor: safetensors in one file or many, and what Flax saves. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16, which safetensors asks it for)
import numpy as np

from redco_cli.errors import ModelError

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]

SAFETENSORS, FLAX = "model.safetensors", "flax_model.msgpack"
INDEX_SUFFIX = ".index.json"
COMPONENT_STEM = "diffusion_pytorch_model"
"""How the files begin in which diffusers keeps a model of its own."""
WEIGHTS = (
    SAFETENSORS,
    f"{SAFETENSORS}{INDEX_SUFFIX}",
    f"{COMPONENT_STEM}.safetensors",
    f"{COMPONENT_STEM}.safetensors{INDEX_SUFFIX}",
    FLAX,
    "model.fp16.safetensors",
    f"{COMPONENT_STEM}.fp16.safetensors",
)
"""Files of weights; of several in a directory the first counts, so that those in half precision do where they alone are
there."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"} | {
    f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
"""Types of tensors as safetensors names them, to numpy's names; others (8-bit floats) hold quantised weights."""
_MAPPED_BYTES = 256 * 2**20
"""How much of a file may be read before its pages are given back."""
_SHOWN = 5
_AGAIN = "download or save the model again"
_HOW_TO_CONVERT = (
    "convert it once where torch is installed: AutoModel...from_pretrained(DIR).save_pretrained(DIR) writes safetensors"
)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a saved model.

    Attributes:
        names: whose names the tensors carry: PyTorch's (`h.0.attn.c_attn.weight`) or Flax's (`h.0.attn.c_attn.kernel`).
        shapes: tensor name to shape as stored.
        dtypes: tensor name to numpy's name of its type as stored.
        read: tensor name and slices of its leading dims to that part of it, in the stored type, read when called.
    """

    names: Literal["pytorch", "flax"]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[[str, Index], Array]


def weights_file(directory: Path) -> str | None:
    """The name of the file, or index of files, that holds the weights in a directory; None where none can be opened."""
    return next((name for name in WEIGHTS if (directory / name).is_file()), None)


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in a directory.

    Raises:
        ModelError: there is none that can be read without torch, or a file is missing, truncated or damaged.
    """
    name = weights_file(directory)
    if name is not None:
        opened = _open_msgpack if name == FLAX else _open_indexed if name.endswith(INDEX_SUFFIX) else _open_one
        return opened(directory / name)
    if any(directory.glob("*.bin")):
        raise ModelError(str(directory), "the weights are in PyTorch's pickle format (.bin)", _HOW_TO_CONVERT)
    remedy = f"it needs {SAFETENSORS}, {SAFETENSORS}{INDEX_SUFFIX} with its files, or {FLAX}"
    raise ModelError(str(directory), "has no weights", remedy)


def sharded_files(index: Path) -> list[Path]:
    """The files that an index names, each once.

    Raises:
        ModelError: the index is damaged, or names a file that is not in its directory.
    """
    tensors = {file: tensor for tensor, file in sorted(_weight_map(index).items(), reverse=True)}
    for file, tensor in sorted(tensors.items()):
        if leads_out(index.parent, file):
            problem = f"the tensor {tensor} is said to be in {file}, which leads out of {index.parent}"
            raise ModelError(str(index), problem, "put the file itself beside the index, and name it there by its name")
    return [index.parent / file for file in sorted(tensors)]


def leads_out(directory: Path, name: str) -> bool:
    """Whether what a downloaded file names as another beside it is elsewhere: `../x`, an absolute path, a link out.

    In the cache of the Hugging Face hub all files are links, to the contents of all revisions of their repository:
    `models--org--name/snapshots/<revision>/x` to `models--org--name/blobs/<digest>`.
    """
    given = PurePath(name)
    if given.is_absolute() or ".." in given.parts:
        return True
    try:
        place, own = (directory / name).resolve(), directory.resolve()
        inside = [own]
        if own.parent.name == "snapshots" and own.parent.parent.name.startswith("models--"):
            inside.append((own.parent.parent / "blobs").resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle, or a name that no file can have
        return True
    return not any(place.is_relative_to(one) for one in inside)


def some(names: list[str]) -> str:
    """A few of many names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(str(index), f"the index is damaged: {error!r}", _AGAIN) from None


def _open_one(file: Path) -> Checkpoint:
    return _open_safetensors([file])


def _open_indexed(index: Path) -> Checkpoint:
    checkpoint = _open_safetensors(sharded_files(index))
    absent = sorted(set(_weight_map(index)) - set(checkpoint.shapes))
    if absent:
        problem = f"{len(absent)} tensors that the index names are in none of its files: {some(absent)}"
        raise ModelError(str(index), problem, _AGAIN)
    return checkpoint


def _open_safetensors(files: list[Path]) -> Checkpoint:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    home: dict[str, Path] = {}
    formats = set()
    for file in files:
        opened = _opened(file)
        formats.add((opened.metadata() or {}).get("format"))
        for name in opened.keys():  # noqa: SIM118  (not a mapping)
            about = opened.get_slice(name)
            shapes[name], dtypes[name], home[name] = tuple(about.get_shape()), about.get_dtype(), file
    unread = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in (*DTYPES, "BOOL")]
    if unread:
        problem = f"{len(unread)} tensors of a type that is not read: {some(unread)}"
        raise ModelError(str(files[0].parent), problem, "choose weights in bfloat16, float16 or float32")
    names: Literal["pytorch", "flax"] = "flax" if "flax" in formats else "pytorch"
    known = {name: DTYPES.get(dtype, "bool") for name, dtype in dtypes.items()}
    return Checkpoint(names, shapes, known, _Reader(home, shapes, known).read)


class _Reader:
    """Reads parts of tensors. A file is mapped into memory, and what was read of it stays there: so it is let go of
    now and then, lest the process grows by the size of the checkpoint.
    """

    def __init__(
        self, home: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
    ) -> None:
        self._home, self._shapes, self._dtypes = home, shapes, dtypes
        self._file: Path | None = None
        self._opened: Any = None
        self._touched = 0

    def read(self, name: str, index: Index) -> Array:
        """`index` of a tensor; the pages of whole rows count as read."""
        if self._file != self._home[name] or self._touched >= _MAPPED_BYTES:
            self._opened = None
            self._file, self._touched = self._home[name], 0
            self._opened = _opened(self._file)
        shape = self._shapes[name]
        rows = range(*index[0].indices(shape[0])) if index else range(1)
        self._touched += len(rows) * prod(shape[1:] if index else shape) * np.dtype(self._dtypes[name]).itemsize
        part: Array = self._opened.get_slice(name)[index] if index else self._opened.get_tensor(name)
        return part


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError:
        raise ModelError(str(file), "the file is missing", _AGAIN) from None
    except (SafetensorError, OSError) as error:
        raise ModelError(str(file), f"the file is truncated or damaged: {error}", _AGAIN) from None


def _open_msgpack(file: Path) -> Checkpoint:
    from flax.serialization import msgpack_restore
    from flax.traverse_util import flatten_dict

    try:
        tensors = flatten_dict(msgpack_restore(file.read_bytes()), sep=".")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(str(file), f"the file is truncated or damaged: {error}", _AGAIN) from None
    return Checkpoint("flax", shapes, dtypes, lambda name, index: np.asarray(tensors[name])[index])
