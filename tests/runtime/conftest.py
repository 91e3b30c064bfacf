"""A tiny project for whole runs of several processes."""

from pathlib import Path

import pytest

PLUGIN = """
import numpy as np
import flax.linen as nn
from redco_cli.plugin.contract import Loss


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="output")(nn.tanh(nn.Dense(256, name="hidden")(x)))


def build_model(ctx):
    return Net()


def load_examples(ctx, split):
    generator = np.random.default_rng(0 if split == "train" else 1)
    n = 40 if split == "train" else 21
    x = generator.normal(size=(n, 128)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
    counted = generator.integers(0, 4, size=n)  # how often an example counts: unevenly, some not at all
    return [{"x": x[i], "y": int(y[i]), "counted": int(counted[i]), "id": i} for i in range(n)]


def collate_fn(ctx, examples):
    note_share(ctx, examples)
    return {
        "x": np.stack([e["x"] for e in examples]),
        "y": np.array([e["y"] for e in examples]),
        "counted": np.array([e["counted"] for e in examples]),
    }


def note_share(ctx, examples):
    pass


def loss_fn(ctx, params, batch, rng, train):
    import optax
    logits = ctx.model(params, batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * batch["counted"]
    right = (logits.argmax(-1) == batch["y"]) * batch["counted"]
    return Loss(each.sum(), batch["counted"].sum(), {"accuracy": right.sum()})


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"]).argmax(-1)


def metric_fn(ctx, examples, predictions):
    return {"exact": sum(e["y"] == p for e, p in zip(examples, predictions, strict=True)) / len(examples)}
"""

RECIPE = """
plugin: {module: plugin.py}
train: {global_batch_size: 8, steps: 12, learning_rate: 1e-2, schedule: cosine, warmup: 10%, max_grad_norm: 1.0}
eval: {every: 4, predict: true}
checkpoint: {every: 4, keep: 3}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `recipe.yaml` and `plugin.py`, made the working directory."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDCO_CACHE", str(tmp_path / "cache"))
    return tmp_path
