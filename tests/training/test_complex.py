"""Complex parameters are trained as their real and imaginary parts would be."""

from pathlib import Path

import pytest

from redco_cli.errors import PluginError, RecipeError
from redco_cli.run import train
from tests.training.tiny import recorded

PLUGIN = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.contract import Loss

START = np.random.default_rng(0).normal(size=(8, 4, 2)).astype(np.float32)


class Complex(nn.Module):
    @nn.compact
    def __call__(self, x):
        start = lambda _: jnp.asarray(START[..., 0] + 1j * START[..., 1], jnp.complex64)
        return jnp.fft.fft(x) @ self.param("w", start)


class Pairs(nn.Module):
    @nn.compact
    def __call__(self, x):
        real = self.param("real", lambda _: jnp.asarray(START[..., 0]))
        return jnp.fft.fft(x) @ (real + 1j * self.param("imaginary", lambda _: jnp.asarray(START[..., 1])))


def build_model(ctx):
    return Complex() if ctx.options["complex"] else Pairs()


def load_examples(ctx, split):
    return [{"x": row.astype(np.float32)} for row in np.random.default_rng(1).normal(size=(64, 8))]


def collate_fn(ctx, examples):
    return {"x": np.stack([example["x"] for example in examples])}


def loss_fn(ctx, params, batch, rng, train):
    off = jnp.abs(ctx.model(params, batch["x"]) - (2 - 1j)) ** 2
    return Loss(off.sum(), len(off))


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"])


def output_fn(ctx, outputs):
    return np.abs(outputs).tolist()
"""
RECIPE = """
plugin: {module: plugin.py, options: {complex: true}}
train: {global_batch_size: 16, steps: 6, learning_rate: 1e-2, schedule: constant, max_grad_norm: 5, weight_decay: 0.1}
logging: {every: 1, plot: false}
eval: {every: 6}
mesh: {data: 1}
output_dir: run
"""
FEWER = ["train.steps=3", "eval.every=3"]


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(RECIPE)


def losses(*settings: str) -> list[float]:
    train("recipe.yaml", [*settings, f"output_dir={len(list(Path().iterdir()))}"])
    newest = max(Path().glob("[0-9]*"), key=lambda path: int(path.name))
    return [record["loss"] for record in recorded(newest) if record["kind"] == "train"]


def test_a_step_is_that_of_real_and_imaginary_parts() -> None:
    """By plain gradients: adam, which measures each number by itself, has one scale for both parts."""
    found = losses("train.optimizer=sgd")
    assert found == pytest.approx(losses("train.optimizer=sgd", "plugin.options={complex: false}"), rel=1e-5)
    assert found[-1] < found[0]


@pytest.mark.parametrize("mesh", ["{data: 2, fsdp: 2, tensor: 2}", pytest.param("{data: 2}", marks=pytest.mark.slow)])
def test_every_mesh_and_cut_equals_one_device(mesh: str) -> None:
    one = losses()
    assert losses(f"mesh={mesh}") == pytest.approx(one, rel=1e-5)
    assert losses(f"mesh={mesh}", "train.micro_batch_size=8") == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_run_is_continued() -> None:
    whole = losses()
    train("recipe.yaml", [*FEWER, "output_dir=run"])
    train("recipe.yaml", ["output_dir=run"])
    assert [record["loss"] for record in recorded("run") if record["kind"] == "train"] == whole


@pytest.mark.slow
def test_what_cannot_hold_them_is_refused() -> None:
    with pytest.raises(RecipeError, match="privacy: complex parameters"):
        train("recipe.yaml", ["privacy={epsilon: 4, delta: 1e-5, clip: 1.0}", "train.max_grad_norm=null"])
    text = Path("plugin.py").read_text()
    Path("plugin.py").write_text(text[: text.index("def output_fn")])
    with pytest.raises(PluginError, match="complex numbers, which JSON cannot hold"):
        train("recipe.yaml", ["eval.predict=true"])
