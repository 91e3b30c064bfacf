"""Which tensor of diffusers holds which parameters, and how: names, order of dims, and two matrices in one tensor.

    ours [in, out] or [rows, columns, in, out]        diffusers' [out, in] or [out, in, rows, columns]
    down_blocks_0/attentions_1/proj_in/kernel         down_blocks.0.attentions.1.proj_in.weight
    .../ff/up/kernel and .../ff/gate/kernel           .../ff.net.0.proj.weight: one above the other

A matrix over the channels of every pixel is a convolution of one pixel in diffusers, [out, in, 1, 1]; which of the two
a checkpoint has is seen by its dims.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from redco_cli.models.diffusion.config import AutoencoderConfig, ComponentConfig, UNetConfig

Path = tuple[str, ...]

_NUMBERED = re.compile(r"^(down_blocks|up_blocks|resnets|attentions|downsamplers|upsamplers|transformer_blocks)_(\d+)$")
_MODULES = {"to_out": "to_out.0", "up": "net.0.proj", "gate": "net.0.proj", "down": "net.2"}
"""Modules that diffusers calls otherwise; the last three are those of a feed-forward layer."""
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_ORDERS = {2: (1, 0), 4: (3, 2, 0, 1)}
"""Number of dims of a kernel to their order in diffusers."""
_OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
"""What diffusers once called the projections of attention in an autoencoder; many files still do."""
_PIXELWISE = frozenset({"conv_shortcut", "quant_conv", "post_quant_conv"})
_PROJECTIONS = frozenset({"proj_in", "proj_out"})


@dataclass(frozen=True)
class Entry:
    """A tensor of diffusers.

    Attributes:
        name: as diffusers 0.39 writes it.
        old: as older versions wrote it; None where that is the same.
        paths: the parameters in it, one after another along its first dim.
        shapes: theirs.
        order: their dims, in the order of the tensor.
        pixelwise: whether diffusers writes it with two more dims of size 1.
    """

    name: str
    old: str | None
    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    pixelwise: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """As diffusers writes it."""
        first, *rest = (self.shapes[0][dim] for dim in self.order)
        return (first * len(self.paths), *rest, *((1, 1) if self.pixelwise else ()))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape holds it, with or without two dims of size 1."""
        bare = self.stored_shape[: len(self.order)]
        return shape == bare or (len(bare) == 2 and shape == (*bare, 1, 1))


def entries(config: ComponentConfig, shapes: Mapping[Path, tuple[int, ...]]) -> tuple[Entry, ...]:
    """The tensors of a checkpoint; together they hold every parameter once.

    Args:
        config: of the model.
        shapes: path of each parameter to its shape.
    """
    by_name: dict[str, list[Path]] = {}
    for path in shapes:
        by_name.setdefault(_name(path), []).append(path)
    return tuple(_entry(config, name, paths, shapes) for name, paths in by_name.items())


def _entry(config: ComponentConfig, name: str, paths: list[Path], shapes: Mapping[Path, tuple[int, ...]]) -> Entry:
    first, module = shapes[paths[0]], paths[0][-2]
    linear = isinstance(config, UNetConfig) and config.use_linear_projection
    one_pixel = module in _PIXELWISE or (module in _PROJECTIONS and not linear)
    is_kernel = paths[0][-1] == "kernel"
    order = _ORDERS[len(first)] if is_kernel else (0,)
    # of a feed-forward layer what is gated comes before its gate
    inside = tuple(sorted(paths, key=lambda path: path[-2] == "gate"))
    old = _old(name) if isinstance(config, AutoencoderConfig) else None
    return Entry(name, old, inside, tuple(shapes[path] for path in inside), order, one_pixel and is_kernel)


def _name(path: Path) -> str:
    """Diffusers' name of the tensor that holds a parameter.

    >>> _name(("up_blocks_1", "attentions_2", "transformer_blocks_0", "ff", "gate", "bias"))
    'up_blocks.1.attentions.2.transformer_blocks.0.ff.net.0.proj.bias'
    """
    *modules, leaf = path
    parts = [_NUMBERED.sub(r"\1.\2", _MODULES.get(one, one)) for one in modules]
    return ".".join((*parts, _LEAVES[leaf]))


def _old(name: str) -> str | None:
    """The old name of a projection; None for any other tensor.

    >>> _old("encoder.mid_block.attentions.0.to_out.0.bias"), _old("encoder.conv_in.bias")
    ('encoder.mid_block.attentions.0.proj_attn.bias', None)
    """
    for new, before in _OLD.items():
        if f".attentions.0.{new}." in name:
            return name.replace(f".{new}.", f".{before}.")
    return None
