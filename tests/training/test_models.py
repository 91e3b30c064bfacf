"""Several models in a run: teachers that are never updated, and modules that are trained together."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from redco_cli import export, load_model
from redco_cli.errors import ModelError, PluginError, RedcoError, UsageError
from redco_cli.planning.inspect import inspect_sharding
from redco_cli.run import evaluate, predict_examples, train
from redco_cli.runtime.mesh import make_mesh
from redco_cli.training.saving.files.digest import digests
from tests.training.tiny import assert_same_run, final_state, interrupted, recorded, write_project

CUBE = "mesh={data: 2, fsdp: 2, tensor: 2}"
DISTILLED = """
def loss_fn(ctx, params, batch, rng, train):
    import jax
    import optax
    own = ctx.model(params["model"], batch["x"])
    other = ctx.models["teacher"](params["teacher"], batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(own, batch["y"])
    apart = ((own - jax.lax.stop_gradient(other)) ** 2).sum()
    return Loss(each.sum() + apart, each.size, {"apart": apart})


def predict_fn(ctx, params, batch, rng):
    return ctx.models["teacher"](params["teacher"], batch["x"])
"""
TEACHER = "models={teacher: {params: teacher}}"
ADVERSARIAL = """
import jax
import jax.numpy as jnp
import optax


class Generator(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.tanh(nn.Dense(32)(x)))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))[:, 0]


def build_model(ctx):
    return {"generator": Generator(), "critic": Critic()}


def optimizer_fn(ctx, schedule):
    labels = lambda params: {name: name for name in params}
    return optax.multi_transform({"generator": optax.sgd(0.1), "critic": optax.set_to_zero()}, labels)


def loss_fn(ctx, params, batch, rng, train):
    stopped = jax.lax.stop_gradient
    fake = ctx.models["generator"](params["generator"], batch["x"])
    fooled = jax.nn.softplus(-ctx.models["critic"](stopped(params["critic"]), fake))
    told = jax.nn.softplus(ctx.models["critic"](params["critic"], stopped(fake)))
    return Loss((fooled + told).sum(), fooled.size, {"fooled": fooled.sum()})


def predict_fn(ctx, params, batch, rng):
    return ctx.models["generator"](params["generator"], batch["x"])[:, 0]


def metric_fn(ctx, examples, predictions):
    return {"mean": float(np.mean(predictions))}
"""


@pytest.fixture
def distilled(tiny_project: Path) -> Path:
    """A run `teacher` of six steps, and a plugin whose loss is pulled towards it."""
    train("recipe.yaml", ["mesh.data=1", "output_dir=teacher", "train.steps=6", "checkpoint.keep=9"])
    with (tiny_project / "plugin.py").open("a") as file:
        file.write(DISTILLED)
    return tiny_project


EXAMPLE = {"x": np.linspace(-1, 1, 8).astype(np.float32), "y": 0, "id": 0}


def logits(run: str, step: int, prefix: str = "['params']") -> np.ndarray:
    arrays = final_state(run, step)
    hidden = EXAMPLE["x"] @ arrays[f"{prefix}['hidden']['kernel']"] + arrays[f"{prefix}['hidden']['bias']"]
    return np.tanh(hidden) @ arrays[f"{prefix}['output']['kernel']"] + arrays[f"{prefix}['output']['bias']"]


@pytest.mark.usefixtures("distilled")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.data=1", CUBE])
def test_a_teacher_is_loaded_and_never_saved(mesh):
    plain = [TEACHER, mesh, "eval.predict=false"]
    train("recipe.yaml", [*plain, "output_dir=whole"])
    assert not [name for name in final_state("whole", 12) if "teacher" in name]
    assert [name for name in final_state("whole", 12) if name.startswith("['params']['model']")]
    interrupted(5, *plain)
    train("recipe.yaml", plain)
    assert_same_run("run", "whole")
    (found,) = (one["prediction"] for one in predict_examples("run", [EXAMPLE], [mesh]))
    np.testing.assert_allclose(found, logits("teacher", 6), rtol=2e-3, atol=2e-3)
    *_, last = [row for row in recorded("run") if row["kind"] == "eval"]
    assert evaluate("run", ["eval.predict=false"]).values["loss"] == pytest.approx(last["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_a_teacher_is_pinned():
    """It stays the checkpoint that was newest when the run began, and must have the same numbers."""
    plain = [TEACHER, "mesh.data=1", "eval.predict=false"]
    train("recipe.yaml", [*plain, "output_dir=whole"])
    interrupted(5, *plain)
    shutil.copytree("teacher/checkpoint-3", "teacher/checkpoint-9")
    meta = json.loads(Path("run/checkpoint-5/meta/metadata").read_text())
    assert meta["recipe"]["models"]["teacher"]["params"] == str(Path("teacher/checkpoint-6").absolute())
    train("recipe.yaml", plain)
    assert_same_run("run", "whole")
    assert evaluate("run", plain[1:]).values == evaluate("recipe.yaml", plain).values
    shutil.rmtree("teacher/checkpoint-6")
    with pytest.raises(RedcoError, match="teacher/checkpoint-6, with which the run was trained, is gone"):
        evaluate("recipe.yaml", plain)
    Path("teacher/checkpoint-9").rename("teacher/checkpoint-6")
    with pytest.raises(RedcoError):
        evaluate("recipe.yaml", plain)


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_a_run_needs_what_it_began_with_no_more_but_its_teacher():
    shutil.copytree("teacher", "first")
    plain = [TEACHER, "model.params=first", "mesh.data=1", "eval.predict=false"]
    interrupted(5, *plain)
    shutil.rmtree("first")
    assert train("recipe.yaml", plain).step == 12
    assert evaluate("run", plain[2:]).examples == 21


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_another_teacher_is_refused():
    plain = ["mesh.data=1", "eval.predict=false"]
    train("recipe.yaml", [*plain, TEACHER])
    text = "models.teacher: its parameters are not those that run/checkpoint-12 was trained with"
    with pytest.raises(ModelError, match=text):
        evaluate("run", [*plain, "models.teacher.params=teacher/checkpoint-3"])
    with pytest.raises(RedcoError, match=r"models.teacher.params"):
        train("run", [*plain, "train.steps=20", "models.teacher.params=teacher/checkpoint-3"])


ROUNDS = """

def run_fn(run):
    start = run.params
    for _ in range(2):
        run.params = start
        run.train(steps=2)
    run.params = {**run.params, "teacher": start["teacher"]}
    run.save()
    if ctx_option(run):
        run.params = {**run.params, "teacher": run.params["model"]}


def ctx_option(run):
    return run.ctx.options.get("refresh", False)
"""


@pytest.mark.slow
def test_an_outer_loop_leaves_its_teacher_as_it_is(distilled):
    with (distilled / "plugin.py").open("a") as file:
        file.write(ROUNDS)
    plain = [TEACHER, "mesh.data=1", "eval.predict=false"]
    assert train("recipe.yaml", plain).step == 4
    with pytest.raises(PluginError, match="other parameters for teacher, which is frozen and in no checkpoint"):
        train("recipe.yaml", [*plain, "plugin.options.refresh=true", "output_dir=other"])


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_a_reference_without_weights_of_its_own_is_in_checkpoints():
    """What nobody else has: the random numbers that `model` began with."""
    plain = ["models={teacher: {dtype: bfloat16}}", "mesh.data=1", "eval.predict=false"]
    train("recipe.yaml", [*plain, "output_dir=whole"])
    kernels = [final_state("whole", 12)[f"['params']['{name}']['hidden']['kernel']"] for name in ("model", "teacher")]
    assert [kernel.dtype.name for kernel in kernels] == ["float32", "bfloat16"]
    np.testing.assert_array_equal(load_model("whole", model="teacher")[1]["hidden"]["kernel"], kernels[1])
    interrupted(5, *plain)
    train("recipe.yaml", plain)
    assert_same_run("run", "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_state_and_export_know_models_of_a_recipe():
    with Path("plugin.py").open("a") as file:
        file.write("\n\ndef init_state(ctx, params):\n    assert 'teacher' not in params\n    return {'ema': params}\n")
    train("recipe.yaml", [TEACHER, "mesh.data=1", "eval.predict=false", "train.steps=2", "predict.use=ema"])
    export("run", output="out")
    assert not [name for name in final_state("run", 2) if "teacher" in name]
    np.testing.assert_array_equal(
        load_model("out")[1]["hidden"]["kernel"], final_state("run", 2)["['state']['ema']['model']['hidden']['kernel']"]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_a_teacher_may_be_smaller_in_memory():
    plain = ["models={teacher: {params: teacher, dtype: bfloat16}}", "mesh.data=1", "eval.predict=false"]
    train("recipe.yaml", [*plain, "train.steps=2"])
    (found,) = (one["prediction"] for one in predict_examples("run", [EXAMPLE], ["mesh.data=1"]))
    np.testing.assert_allclose(found, logits("teacher", 6), rtol=0.05, atol=0.05)
    with Path("recipe.yaml").open("a") as file:
        file.write("models: {teacher: {params: teacher, dtype: bfloat16}}\n")
    report = inspect_sharding("recipe.yaml", mesh={"fsdp": 2})
    kinds = {group["path"]: group["dtype"] for group in report["groups"]}
    assert kinds["teacher/hidden/kernel"] == "bfloat16"
    assert kinds["model/hidden/kernel"] == "float32"
    assert report["memory"]["gradients"] == sum(
        group["bytes_per_device"] for group in report["groups"] if group["path"].startswith("model/")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_a_second_model_may_be_trained_too():
    train("recipe.yaml", ["models={teacher: {params: teacher, frozen: false}}", "mesh.data=1", "eval.predict=false"])
    arrays = final_state("run", 12)
    assert "['params']['teacher']['hidden']['kernel']" in arrays
    assert any("['training']" in name and "['teacher']" in name for name in arrays)  # moments of its gradient


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_one_model_of_several_begins_another_run(distilled):
    train("recipe.yaml", [TEACHER, "mesh.data=1", "eval.predict=false", "output_dir=student"])
    write_project(distilled)
    train("recipe.yaml", ["model.params=student", "mesh.data=1", "train={steps: 1, warmup: 0, learning_rate: 0.0}"])
    np.testing.assert_allclose(logits("run", 1), logits("student", 12, "['params']['model']"), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.data=1", CUBE])
def test_two_modules_with_an_optimizer_each(tiny_project, mesh):
    with (tiny_project / "plugin.py").open("a") as file:
        file.write(ADVERSARIAL)
    train("recipe.yaml", [mesh, "output_dir=whole"])
    first = final_state("whole", 6)
    last = final_state("whole", 12)
    kernels = ("['params']['generator']['Dense_0']['kernel']", "['params']['critic']['Dense_0']['kernel']")
    assert not np.array_equal(first[kernels[0]], last[kernels[0]])
    assert np.array_equal(first[kernels[1]], last[kernels[1]])
    assert not np.array_equal(last[kernels[0]], last[kernels[1]])
    interrupted(5, mesh)
    train("recipe.yaml", [mesh])
    assert_same_run("run", "whole")
    again = ["model.params=whole", "train={steps: 1, warmup: 0, learning_rate: 0.0}", "output_dir=again"]
    train("recipe.yaml", [mesh, *again])
    for kernel in kernels:
        np.testing.assert_allclose(final_state("again", 1)[kernel], last[kernel], atol=0.02)  # a step has moved them


@pytest.mark.usefixtures("distilled")
def test_what_is_refused():
    for overrides, problem in (
        (["models={model: {params: teacher}}"], "models.model"),
        ([TEACHER, "train.freeze=[hidden/.*]"], "did you mean model/(?:hidden/.*)?"),
        (["models={teacher: {params: nowhere}}"], "models.teacher.params"),
    ):
        with pytest.raises(RedcoError, match=re.escape(problem)):
            train("recipe.yaml", [*overrides, "mesh.data=1"])


def test_a_digest_is_of_the_numbers_and_not_of_their_places():
    generator = np.random.default_rng(0)
    array = generator.normal(size=(16, 8)).astype(np.float32)
    one = make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, str)
    many = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, str)
    split = jax.sharding.NamedSharding(many, jax.sharding.PartitionSpec("fsdp", "tensor"))
    expected = digests({"t": {"w": jax.device_put(array, jax.devices()[0])}}, one)
    assert digests({"t": {"w": jax.device_put(array, split)}}, many) == expected
    swapped = array.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    for other in (swapped, array + np.float32(1e-6), array.reshape(8, 16), array.astype(np.float16)):
        assert digests({"t": {"w": jax.device_put(other, jax.devices()[0])}}, one) != expected


@pytest.mark.slow
def test_one_of_several_modules_is_exported_and_loaded(tiny_project):
    with (tiny_project / "plugin.py").open("a") as file:
        file.write(ADVERSARIAL)
    train("recipe.yaml", ["mesh.data=1", "train.steps=2", "eval.predict=false"])
    export("run", output="out", model="critic")
    inputs = EXAMPLE["x"][None]
    for model, params in (load_model("run", model="critic"), load_model("out")):
        arrays = final_state("run", 2)
        np.testing.assert_array_equal(params["Dense_0"]["kernel"], arrays["['params']['critic']['Dense_0']['kernel']"])
        assert model(params, inputs).shape == (1,)
    with pytest.raises(UsageError, match="the run has no model model"):
        export("run", output="other")
    with pytest.raises(UsageError, match="it has generator, critic"):
        load_model("run")


@pytest.mark.slow
@pytest.mark.usefixtures("distilled")
def test_a_student_is_loaded_without_its_teacher():
    train("recipe.yaml", [TEACHER, "mesh.data=1", "eval.predict=false", "train.steps=2"])
    model, params = load_model("run")
    expected = logits("run", 2, "['params']['model']")
    np.testing.assert_allclose(model(params, EXAMPLE["x"][None])[0], expected, rtol=2e-3, atol=2e-3)
    export("run", output="out")
    np.testing.assert_array_equal(load_model("out")[1]["hidden"]["kernel"], params["hidden"]["kernel"])
    with pytest.raises(ModelError, match="teacher was never updated, and is in no checkpoint"):
        load_model("run", model="teacher")
