"""State of a plugin in a run: averages, batch statistics, target networks; on every mesh, resumed, predicted with."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from redco_cli.planning.inspect import inspect_sharding
from redco_cli.run import evaluate, predict_examples, train
from tests.training.tiny import assert_same_run, final_state, interrupted, recorded

CUBE = "mesh={data: 2, fsdp: 2, tensor: 2}"
AVERAGED = """
import dataclasses
import jax
import jax.numpy as jnp

_loss = loss_fn


def init_state(ctx, params):
    return {"ema": params, "mean": jnp.zeros(8), "updates": 0, "target": params}


def loss_fn(ctx, params, batch, rng, train):
    found = _loss(ctx, params, batch, rng, train)
    far = ctx.model(params, batch["x"]) - ctx.model(ctx.state["target"], batch["x"])
    return dataclasses.replace(
        found,
        sum=found.sum + 0.1 * (far**2).sum(),
        metrics={**found.metrics, "at": (ctx.step, 1), "updated": (ctx.state["updates"], 1)},
        stats={"x": (batch["x"].sum(0), len(batch["x"]))},
    )


def update_state(ctx, state, params, stats):
    ema = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["ema"], params)
    target = jax.tree.map(lambda old, new: jnp.where(ctx.step % 4 == 0, new, old), state["target"], params)
    return {"ema": ema, "mean": 0.9 * state["mean"] + stats["x"], "updates": state["updates"] + 1, "target": target}


def predict_fn(ctx, params, batch, rng):
    steps = jnp.full(len(batch["x"]), ctx.step)
    return {"logits": ctx.model(params, batch["x"]), "steps": steps, "updates": 0 * steps + ctx.state["updates"]}


def metric_fn(ctx, examples, predictions):
    return {"steps": float(predictions[0]["steps"])}
"""
NORMED = """
class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16, use_bias=False)(x))
        return nn.Dense(8)(nn.tanh(x))


def build_model(ctx):
    return Normed()


def init_state(ctx, params):
    return ctx.model.init_variables()


def loss_fn(ctx, params, batch, rng, train):
    import optax
    found = ctx.model(params, batch["x"], train=train, variables=ctx.state, mutable=train and list(ctx.state))
    logits, updated = found if train else (found, None)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Loss(each.sum(), each.size, stats={"variables": (updated, 1)} if train else {})


def update_state(ctx, state, params, stats):
    return stats["variables"]


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"], variables=ctx.state).argmax(-1)
"""


@pytest.fixture
def averaged(tiny_project: Path) -> Path:
    """A plugin with averaged weights, a target network that is renewed every four steps, and counts."""
    with (tiny_project / "plugin.py").open("a") as file:
        file.write(AVERAGED)
    return tiny_project


def state_of(run: str, step: int) -> dict[str, np.ndarray]:
    return {name: leaf for name, leaf in final_state(run, step).items() if name.startswith("['state']")}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert wanted
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("averaged")
def test_state_follows_every_update():
    train("recipe.yaml", ["checkpoint={every: 1, keep: 99}", "train.steps=6", "eval.at_start=false"])
    states = [final_state("run", step) for step in range(1, 7)]
    kernel = "['hidden']['kernel']"
    for before, after in itertools.pairwise(states):
        expected = 0.9 * before[f"['state']['ema']{kernel}"] + 0.1 * after[f"['params']{kernel}"]
        np.testing.assert_allclose(after[f"['state']['ema']{kernel}"], expected, rtol=1e-6)
    for step, state in enumerate(states, start=1):
        target = state[f"['state']['target']{kernel}"]
        # Not bit for bit: XLA may compute the update twice, and fuse it otherwise the second time.
        assert np.allclose(target, states[3][f"['params']{kernel}"], rtol=1e-6) == (step >= 4)
        assert state["['state']['updates']"] == step
    rows = [row for row in recorded("run") if row["kind"] == "train"]
    assert [(row["at"], row["updated"]) for row in rows] == [(step, step) for step in range(6)]
    evaluation = next(row for row in recorded("run") if row["kind"] == "eval")
    assert (evaluation["at"], evaluation["updated"], evaluation["steps"]) == (4, 4, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("averaged")
@pytest.mark.parametrize("mesh", ["mesh.data=1", CUBE])
def test_a_run_that_was_stopped_has_the_same_state(mesh):
    train("recipe.yaml", [mesh, "output_dir=whole"])
    interrupted(5, mesh)
    train("recipe.yaml", [mesh])
    assert_same_run("run", "whole")
    assert len(state_of("run", 12)) == 2 * 4 + 2


@pytest.mark.slow
@pytest.mark.usefixtures("averaged")
def test_state_is_the_same_however_the_batch_is_cut():
    plain = ["plugin.options.noise=0.0", "eval.at_start=false", "mesh.data=1"]
    train("recipe.yaml", [*plain, "output_dir=cut"])
    train("recipe.yaml", [*plain, "train.micro_batch_size=16", "output_dir=whole"])
    assert_close(state_of("whole", 12), state_of("cut", 12))


@pytest.mark.slow
@pytest.mark.usefixtures("averaged")
def test_state_is_the_same_on_every_mesh():
    plain = ["plugin.options.noise=0.0", "eval.at_start=false"]
    train("recipe.yaml", [*plain, "mesh.data=1", "output_dir=one"])
    train("recipe.yaml", [*plain, CUBE, "output_dir=cube"])
    assert_close(state_of("cube", 12), state_of("one", 12))
    rows = {row["path"]: row for row in json.loads(Path("cube/sharding.json").read_text())["state"]}
    places = {row["path"]: row for row in json.loads(Path("cube/sharding.json").read_text())["parameters"]}
    for path, row in places.items():
        assert rows[f"ema/{path}"]["spec"] == rows[f"target/{path}"]["spec"] == row["spec"]
    assert rows["target/hidden/kernel"]["spec"] == ["fsdp", "tensor"]
    assert rows["mean"]["reason"] == "whole: belongs to no parameter"


@pytest.mark.slow
@pytest.mark.usefixtures("averaged")
def test_predictions_know_state_and_step_and_may_use_averaged_parameters():
    train("recipe.yaml", ["mesh.data=1", "eval.predict=false"])
    example = {"x": np.linspace(-1, 1, 8).astype(np.float32), "y": 0, "id": 0}
    arrays = final_state("run", 12)

    def logits(prefix: str) -> np.ndarray:
        hidden = example["x"] @ arrays[f"{prefix}['hidden']['kernel']"] + arrays[f"{prefix}['hidden']['bias']"]
        return np.tanh(hidden) @ arrays[f"{prefix}['output']['kernel']"] + arrays[f"{prefix}['output']['bias']"]

    for overrides, prefix in (([], "['params']"), (["predict.use=ema"], "['state']['ema']")):
        for mesh in ("mesh.data=1", CUBE):
            (found,) = (one["prediction"] for one in predict_examples("run", [example], [mesh, *overrides]))
            assert (found["steps"], found["updates"]) == (12, 12)
            np.testing.assert_allclose(found["logits"], logits(prefix), rtol=2e-3, atol=2e-3)
    assert not np.allclose(logits("['params']"), logits("['state']['ema']"), atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.data=4", CUBE])
def test_batch_statistics_are_those_of_one_device(tiny_project, mesh):
    with (tiny_project / "plugin.py").open("a") as file:
        file.write(NORMED)
    train("recipe.yaml", ["mesh.data=1", "output_dir=one"])
    train("recipe.yaml", [mesh])
    assert_close(state_of("run", 12), state_of("one", 12))
    assert len(state_of("run", 12)) == 2
    found = evaluate("run", [mesh])
    *_, last = [row for row in recorded("run") if row["kind"] == "eval"]
    assert found.values["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert found.values["exact"] == last["exact"]


def moved(recipe: str, mesh: dict[str, int]) -> tuple[int, int]:
    """Bytes of parameters gathered, and of everything else, in the compiled step."""
    report = inspect_sharding(recipe, mesh=mesh, compile_it=True)
    gathered = [one for one in report["compiled"]["collectives"] if one["kind"] == "all-gather"]
    everything = sum(one["bytes"] for one in report["compiled"]["collectives"])
    own = sum(one["bytes"] for one in gathered)
    return own, everything - own


@pytest.mark.slow
def test_a_target_network_moves_what_its_parameters_would(averaged):
    """As a second forward pass of the parameters: they are gathered for it, and nothing else is moved for the state."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    changes = {
        "own": ('ctx.state["target"], batch["x"])', 'jax.lax.stop_gradient(params), 2 * batch["x"])'),
        "none": ('ctx.model(ctx.state["target"], batch["x"])', "0"),
    }
    found = {"target": moved("recipe.yaml", mesh)}
    text = (averaged / "plugin.py").read_text()
    for name, (old, new) in changes.items():
        assert old in text
        (averaged / "plugin.py").write_text(text.replace(old, new))
        found[name] = moved("recipe.yaml", mesh)
    assert found["target"][0] <= 2 * found["none"][0]
    assert sum(found["target"]) <= sum(found["own"]) + found["none"][0]


@pytest.mark.usefixtures("averaged")
def test_a_plan_shows_state():
    report = inspect_sharding("recipe.yaml", mesh={"data": 2, "fsdp": 2, "tensor": 2})
    rows = {row["path"]: row for row in report["state"]}
    assert rows["ema/hidden/kernel"]["reason"] == "lies as hidden/kernel"
    assert rows["ema/hidden/kernel"]["spec"] == [["fsdp"], ["tensor"]]
    parameters = sum(row["bytes_per_device"] for row in report["groups"])
    assert report["memory"]["plugin_state"] == 2 * parameters + 8 * 4 + 4
    assert jax.device_count() == 8
