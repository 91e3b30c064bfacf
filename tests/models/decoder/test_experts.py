"""Experts whose width is split over `tensor`: what devices sum is tokens, and the numbers are those of one device."""

import itertools

import jax
import numpy as np
import pytest

from redco_cli.models.decoder.experts import mix
from redco_cli.models.decoder.experts.mix import BRANCH, _groups
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.sharding import derive
from redco_cli.sharding.tensor_split import split_as, splits_ending, summed_by_others, sums_itself
from tests.sharding.measure import device_mesh
from tests.sharding.trial import attempt

ROWS, LENGTH, FEATURES, LAYERS = 4, 32, 32, 2
TOKENS = LAYERS * ROWS // 2 * LENGTH * FEATURES * 4
"""Bytes of the rows that a device has of all tokens, in all layers."""
SIZES = {
    "vocab_size": 96,
    "hidden_size": FEATURES,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": LENGTH,
}
FAMILIES = {
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8},
    "gpt_oss": {"intermediate_size": 64, "num_local_experts": 8, "head_dim": 8},  # with biases
    "qwen2_moe": {"intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8},  # beside a shared one
}


@pytest.fixture(name="in_groups")
def computed_in_groups(monkeypatch):
    """As large experts are."""
    monkeypatch.setattr(mix, "_LEAST", 1)


def step_of(family, router=1.0, adapted=()):
    """A loss, random parameters and a batch."""
    model = resolve_model(ModelSection(config={"model_type": family, **SIZES, **FAMILIES[family]}), where=str)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype) * 0.1, model.abstract)
    params["layers"]["experts"]["router"]["kernel"] *= router
    ids = rng.integers(0, 96, (ROWS, LENGTH)).astype(np.int32)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}

    def loss_fn(params, batch):
        with summed_by_others(adapted):
            loss = model.next_token_loss(params, **batch)
        return loss.sum / loss.weight

    return loss_fn, params, batch


def on_tensor(loss_fn, params, batch):
    """The plan, and the step that knows it, beside the same on one device."""
    plan = derive(loss_fn, params, batch, {"data": 1, "fsdp": 2, "tensor": 4})

    def known(params, batch):
        with split_as(plan, device_mesh(plan.mesh)):
            return loss_fn(params, batch)

    return plan, attempt(known, params, batch, plan)


def summed(moved):
    """Bytes of all-reduces over `tensor`."""
    return sum(one.count * one.bytes for one in moved if (one.kind, one.axes) == ("all-reduce", ("tensor",)))


def foreseen(plan):
    """The same, as it was predicted."""
    return sum(one.bytes for one in plan.collectives if (one.kind, one.axis) == ("all-reduce", "tensor"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "router"), [*itertools.product(FAMILIES, (1.0, 0.0))])
@pytest.mark.usefixtures("in_groups")
def test_experts_split_over_tensor_give_what_one_device_does(family, router):
    _, found = on_tensor(*step_of(family, router))
    assert found.loss < 1e-5  # with a router of zeros all tokens go to the same experts, and branches compute most
    assert max(found.gradients.values()) < 2e-5


@pytest.mark.slow
@pytest.mark.usefixtures("in_groups")
def test_what_devices_sum_is_a_row_for_each_token_and_not_for_each_place_in_an_expert():
    loss_fn, params, batch = step_of("mixtral")
    plan, found = on_tensor(loss_fn, params, batch)
    assert plan.gathered["layers"]["experts"]["down"][2] == "tensor"
    apart = attempt(loss_fn, params, batch, plan)  # which does not know how they are split
    # Room for twice their share of two experts each, forward and backward: four rows for each token.
    assert summed(apart.moved) - summed(found.moved) >= 2 * (4 - 1) * TOKENS


@pytest.mark.usefixtures("in_groups")
def test_products_that_an_adapter_sums_are_left_to_it():
    plan = derive(*step_of("mixtral"), {"data": 1, "fsdp": 2, "tensor": 4})
    with split_as(plan, device_mesh(plan.mesh)):
        assert [split.dim for split in splits_ending("experts/down")] == [2]
        assert splits_ending("perts/down") == []
        assert sums_itself("layers/experts/down")
        with summed_by_others(["model/layers/experts/down"]):
            assert not sums_itself("layers/experts/down")
            assert sums_itself("layers/experts/up")
    adapted = derive(*step_of("mixtral", adapted=["layers/experts/gate"]), plan.mesh)
    # Forward and backward; what the experts made is not computed again.
    assert foreseen(adapted) - foreseen(plan) == 2 * (4 - 1) * TOKENS


@pytest.mark.parametrize(
    ("count", "width", "sizes"),
    [
        *((8, 14336, [2] * 4), (6, 14336, [2] * 3), (3, 14336, [1] * 3), (5, 14336, [5])),
        *((8, 2048, [4] * 2), (8, 1024, [8]), (8, 64, [8])),  # 128, 64 and 4 MiB
    ],
)
def test_experts_compute_in_equal_groups_of_many_bytes(count, width, sizes):
    groups = _groups(jax.ShapeDtypeStruct((count, 4096, width), "bfloat16"), 1)
    assert [group.stop - group.start for group in groups] == sizes
    assert [expert for group in groups for expert in range(count)[group]] == list(range(count))


@pytest.mark.parametrize("remat", ["full", "dots", "attention", "offload"])
def test_devices_agree_upon_a_branch_once(remat):
    model = resolve_model(ModelSection(config={"model_type": "mixtral", **SIZES, **FAMILIES["mixtral"]}), where=str)
    module = model.module.clone(remat=remat)
    ids = np.zeros((2, LENGTH), np.int32)
    step = jax.make_jaxpr(jax.grad(lambda params: module.apply({"params": params}, ids).sum()))(model.abstract)
    assert str(step).count(f"name={BRANCH}") == 1  # forward; backward it is what was kept
