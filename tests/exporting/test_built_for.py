"""A module that `init_batch` describes by arrays which are no rows of examples: a graph and its edges."""

from pathlib import Path

import jax
import numpy as np
import pytest

from redco_cli import export, load_model, train

GRAPH = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.plugin.contract import Loss

NODES, EDGES = 30, np.stack([np.arange(30), (np.arange(30) + 1) % 30]).astype(np.int32)
FEATURES = np.random.default_rng(0).normal(size=(NODES, 4)).astype(np.float32)


class Graph(nn.Module):
    @nn.compact
    def __call__(self, features, edges):
        table = self.variable("table", "shift", lambda: jnp.arange(3.0)).value
        hidden = nn.tanh(nn.Dense(8)(features))
        heard = jnp.zeros_like(hidden).at[edges[1]].add(hidden[edges[0]])
        return nn.Dense(2)(heard) + table[edges[0][0] % 3]


def build_model(ctx):
    return Graph()


def init_batch(ctx):
    return {"features": FEATURES, "edges": jax.ShapeDtypeStruct(EDGES.shape, np.int32)}


def init_state(ctx, params):
    return {"features": jnp.asarray(FEATURES), "edges": jnp.asarray(EDGES), **ctx.model.init_variables()}


def load_examples(ctx, split):
    return [{"node": node, "label": int(FEATURES[node - 1, 0] > 0)} for node in range(NODES)]


def collate_fn(ctx, examples):
    return {name: np.array([example[name] for example in examples], np.int32) for name in ("node", "label")}


def logits(ctx, params, batch):
    state = ctx.state
    return ctx.model(params, state["features"], state["edges"], variables={"table": state["table"]})[batch["node"]]


def loss_fn(ctx, params, batch, rng, train):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(ctx, params, batch), batch["label"])
    return Loss(losses.sum(), losses.size)


def predict_fn(ctx, params, batch, rng):
    return logits(ctx, params, batch).argmax(-1)
"""
RECIPE = """
plugin: {module: graph.py}
train: {global_batch_size: 10, steps: 4, learning_rate: 1e-2}
eval: {every: 2}
logging: {plot: false}
output_dir: run
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "recipe.yaml").write_text(RECIPE)


@pytest.mark.slow
def test_a_graph_is_trained_and_exported_under_jit(capfd: pytest.CaptureFixture[str]) -> None:
    """The module indexes what it keeps, a numpy array, by what is traced: so does whoever loads it."""
    one = train("recipe.yaml", ["mesh.data=1"])
    two = train("recipe.yaml", ["mesh.data=1", "mesh.tensor=2", "output_dir=two"])
    assert two.train["loss"] == pytest.approx(one.train["loss"], rel=1e-5)
    export("run", output="out")
    assert "not exported: edges, features of ctx.state, which the plugin keeps" in capfd.readouterr().err
    features, edges = np.zeros((30, 4), np.float32), np.zeros((2, 30), np.int32)
    for place in ("run", "out"):
        model, params = load_model(place)
        found = jax.jit(lambda params, model=model: model(params, features, edges))(params)
        assert found.shape == (30, 2)
