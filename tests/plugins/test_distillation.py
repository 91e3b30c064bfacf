"""Distillation: the loss against PyTorch, and a student beside its teacher."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

from redco_cli.errors import PluginError
from redco_cli.plugin.contract import Context
from redco_cli.plugin.parts import builtin
from redco_cli.recipe.schema import OtherModelSection
from tests.plugins.trained import trained

distillation = builtin("distillation")


def test_the_loss_is_that_of_hinton(context):
    own, wanted = np.random.default_rng(0).normal(size=(2, 3, 10)).astype(np.float32)
    wanted[0] = 2 * own[0]
    ctx = context("distillation", temperature=2.0, share=0.7)
    models = {name: lambda params, images, **named: params for name in ("model", "teacher")}
    ctx = Context(models["model"], None, ctx.options, ctx.recipe, models=models)
    batch = {"pixel_values": np.zeros((3, 8, 8, 1), np.float32), "labels": np.array([1, 2, 3])}
    loss = jax.jit(lambda params: distillation.loss_fn(ctx, params, batch, None, False))(
        {"model": own, "teacher": wanted}
    )
    own, wanted = torch.tensor(own), torch.tensor(wanted)
    soft = functional.kl_div((own / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="sum")
    hard = functional.cross_entropy(own, torch.tensor([1, 2, 3]), reduction="sum")
    assert loss.sum == pytest.approx(float(0.3 * hard + 0.7 * 4 * soft), rel=1e-5)
    assert loss.weight == 3
    assert loss.metrics["agreement"] == (own.argmax(-1) == wanted.argmax(-1)).sum().item() > 0


def test_a_small_network_learns_from_one_that_is_trained(context):
    ctx = context("distillation")
    with pytest.raises(PluginError, match=r"models.teacher.params: a teacher that was never trained") as refused:
        distillation.build_model(ctx)
    assert "such as runs/digits" in str(refused.value)
    models = {"teacher": OtherModelSection(params="runs/digits")}
    networks = distillation.build_model(replace(ctx, recipe=ctx.recipe.model_copy(update={"models": models})))
    sizes = {}
    for name, network in networks.items():
        shapes = jax.eval_shape(network.init, jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert sizes["teacher"] > 10 * sizes["model"]


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"share": 1.5}])
def test_what_cannot_be_meant_is_refused(given):
    with pytest.raises(ValueError, match="above 0, and from 0 to 1"):
        distillation.Options(**given)


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_student_is_within_two_points_of_its_teacher(seed, tmp_path):
    shared = [f"seed={seed}", "logging.plot=false"]
    trained("digits", tmp_path / "teacher", shared)
    values = trained("distillation", tmp_path / "student", [*shared, f"models.teacher.params={tmp_path}/teacher"])[-1]
    assert values["accuracy"] >= values["teacher_accuracy"] - 0.02
