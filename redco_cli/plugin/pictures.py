"""Pictures that a plugin draws of what it predicts: PNG files in the output directory, beside `loss.png`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from redco_cli.errors import PluginError, StorageError
from redco_cli.plugin.contract import Context

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.figure import Figure

OWN_PICTURE = "loss.png"
"""The core's own."""
PIXEL = 6
"""Dots that a pixel of a small image gets on each side."""
WIDEST = 2400
"""Dots of a picture whose pixels get more than one."""


@contextlib.contextmanager
def picture(ctx: Context, name: str, size: tuple[float, float] = (6.0, 4.0)) -> Iterator[Figure]:
    """A matplotlib figure to draw in, which becomes a file in the output directory, replaced in one stroke.

        with picture(ctx, "returns.png") as figure:
            figure.subplots().plot(returns)

    For `metric_fn` and `run_fn`. All processes may draw; the first one writes.

    Args:
        ctx: of the run.
        name: of the file: letters before `.png`, and no folder.
        size: of the figure, width and height in inches of 160 dots.

    Raises:
        PluginError: that is no name for a picture.
        StorageError: the file cannot be written.
    """
    if not name.endswith(".png") or name.startswith(".") or Path(name).name != name or name == OWN_PICTURE:
        remedy = f'give a file name that ends in .png, such as "samples.png", and is not {OWN_PICTURE}'
        raise PluginError("picture", f"{name!r} cannot be the name of a picture", remedy)
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    if jax.process_index() == 0:
        _write(figure, Path(ctx.recipe.output_dir, name))


def image_grid(ctx: Context, name: str, images: Any, columns: int) -> None:
    """Images row by row in one picture; see `picture`.

    Args:
        ctx: of the run.
        name: of the file.
        images: [N, height, width] or [N, height, width, 3], from 0 (black) to 1; beyond that cut off.
        columns: how many in a row; the last row may be shorter.

    Raises:
        PluginError: no name for a picture, or no such images.
        StorageError: the file cannot be written.
    """
    array = np.clip(np.asarray(images, np.float32), 0, 1)
    if array.ndim not in (3, 4) or not len(array) or (array.ndim == 4 and array.shape[-1] != 3):
        problem = f"got an array of shape {list(array.shape)}"
        raise PluginError("image_grid", problem, "give [N, height, width] or [N, height, width, 3], N at least 1")
    columns = min(columns, len(array))
    missing = -len(array) % columns
    blank = np.ones((missing, *array.shape[1:]), np.float32)
    framed = np.concatenate([array, blank])
    framed = np.pad(framed, [(0, 0), (1, 1), (1, 1), (0, 0)][: array.ndim], constant_values=1)
    cells = framed.reshape(-1, columns, *framed.shape[1:])
    whole = np.concatenate(list(np.concatenate(list(cells.swapaxes(0, 1)), axis=2)), axis=0)
    dots = max(1, min(PIXEL, WIDEST // whole.shape[1]))
    with picture(ctx, name, (whole.shape[1] * dots / 160, whole.shape[0] * dots / 160)) as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        axes.imshow(whole, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _write(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a model may write any letter
            figure.savefig(temporary, format="png", dpi=160)
        os.replace(temporary, path)
    except OSError as error:
        remedy = "free space there and make it writable, or set eval.predict=false"
        raise StorageError(str(path), f"cannot be written: {error.strerror}", remedy) from None
