"""Pictures of a plugin: files beside the others of a run, or an error that says why not."""

import matplotlib.image
import numpy as np
import pytest

from redco_cli.errors import PluginError, StorageError
from redco_cli.plugin.contract import Context
from redco_cli.plugin.parts import image_grid, picture
from redco_cli.plugin.pictures import PIXEL
from redco_cli.recipe.schema import Recipe


@pytest.fixture
def ctx(tmp_path):
    recipe = Recipe.model_validate({"plugin": {"module": "p.py"}, "output_dir": str(tmp_path / "run")})
    return Context(None, None, {}, recipe, "predict")


def test_images_stand_row_by_row_in_a_frame(ctx, tmp_path):
    images = np.stack([np.full((4, 5), level) for level in (0.0, 0.5, 1.0)])
    image_grid(ctx, "samples.png", images, columns=2)
    (path,) = (tmp_path / "run").iterdir()
    found = matplotlib.image.imread(path)[..., 0]
    assert (path.name, found.shape) == ("samples.png", (2 * 6 * PIXEL, 2 * 7 * PIXEL))
    middles = found[3 * PIXEL :: 6 * PIXEL, 3 * PIXEL :: 7 * PIXEL]
    np.testing.assert_allclose(middles, [[0, 0.5], [1, 1]], atol=0.01)
    assert (found[:PIXEL] == 1).all()


def test_colours_are_kept_and_what_is_beyond_is_cut_off(ctx, tmp_path):
    image_grid(ctx, "samples.png", np.full((1, 2, 2, 3), [2.0, 0.5, -1.0]), columns=8)
    found = matplotlib.image.imread(tmp_path / "run" / "samples.png")[2 * PIXEL, 2 * PIXEL, :3]
    np.testing.assert_allclose(found, [1, 0.5, 0], atol=0.01)


@pytest.mark.parametrize("name", ["samples", "../samples.png", ".hidden.png", "loss.png", "a/b.png"])
def test_other_names_are_refused(ctx, tmp_path, name):
    with pytest.raises(PluginError) as caught, picture(ctx, name):
        pass
    assert str(caught.value) == (
        f"picture: {name!r} cannot be the name of a picture\n"
        '  -> give a file name that ends in .png, such as "samples.png", and is not loss.png'
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [(4, 5), (0, 4, 5), (2, 4, 5, 2)])
def test_what_are_no_images_is_refused(ctx, shape):
    with pytest.raises(PluginError) as caught:
        image_grid(ctx, "samples.png", np.zeros(shape), columns=2)
    assert str(caught.value) == (
        f"image_grid: got an array of shape {list(shape)}\n"
        "  -> give [N, height, width] or [N, height, width, 3], N at least 1"
    )


def test_a_disk_that_takes_no_picture_is_named(ctx, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError) as caught, picture(ctx, "samples.png"):
        pass
    assert str(caught.value) == (
        f"{tmp_path}/run/samples.png: cannot be written: File exists\n"
        "  -> free space there and make it writable, or set eval.predict=false"
    )


def test_another_process_draws_and_writes_nothing(ctx, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with picture(ctx, "samples.png") as figure:
        figure.subplots().plot([1, 2])
    assert not (tmp_path / "run").exists()
