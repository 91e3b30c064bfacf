"""Weights in MXFP4, as gpt-oss is published, as if they were in bfloat16, which holds their values exactly.

Of a kernel [X, E, F] a checkpoint has `NAME_blocks` [X, F, G, 16], two numbers of 4 bits in each byte, the low one
first, and `NAME_scales` [X, F, G], the exponent of each of the G groups that E is cut into, 127 more than it is.

Open Compute Project, Microscaling Formats, 2023; `transformers/integrations/mxfp4.py`.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from redco_cli.models.weights.files import Array, Checkpoint, Index

_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", "uint8"
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = np.array([*_HALF, *(-value for value in _HALF)], np.float32)
_POWERS = np.ldexp(np.ones(255, np.float32), np.arange(-127, 128))


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with kernels for what it has in MXFP4; a part of one is unpacked when it is read."""
    shapes, dtypes = dict(checkpoint.shapes), dict(checkpoint.dtypes)
    names = [name.removesuffix(_BLOCKS) for name in shapes if name.endswith(_BLOCKS)]
    packed = {name: checkpoint.shapes[name + _BLOCKS] for name in names if _is_packed(checkpoint, name)}
    for name, (count, outputs, groups, width) in packed.items():
        for part in (_BLOCKS, _SCALES):
            del shapes[name + part], dtypes[name + part]
        shapes[name], dtypes[name] = (count, groups * width * 2, outputs), "bfloat16"

    def read(name: str, index: Index) -> Array:
        if name not in packed:
            return checkpoint.read(name, index)
        whole = (*index, *(slice(None),) * (3 - len(index)))
        first, last, _ = whole[1].indices(shapes[name][1])
        group = 2 * packed[name][3]
        box = (whole[0], whole[2], slice(first // group, -(-last // group)))
        blocks, scales = (checkpoint.read(name + part, box) for part in (_BLOCKS, _SCALES))
        values = _VALUES[np.stack([blocks & 15, blocks >> 4], axis=-1)] * _POWERS[scales][..., None, None]
        turned = values.reshape(*values.shape[:2], -1).transpose(0, 2, 1)
        start = first - first // group * group
        return np.ascontiguousarray(turned[:, start : start + last - first].astype(ml_dtypes.bfloat16))

    return replace(checkpoint, shapes=shapes, dtypes=dtypes, read=read) if packed else checkpoint


def _is_packed(checkpoint: Checkpoint, name: str) -> bool:
    blocks, scales = checkpoint.shapes[name + _BLOCKS], checkpoint.shapes.get(name + _SCALES)
    return len(blocks) == 4 and blocks[:3] == scales and checkpoint.dtypes[name + _BLOCKS] == _BYTES
