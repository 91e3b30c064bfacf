"""What a step may move, for each kind of model and target: a compiled step that moves more has lost something.

A table of budgets, for two layers on `fsdp` 4 and `tensor` 2, in units that follow from the model:

    gathers      of the parameters over `fsdp`, in their bytes on a shard of `tensor` in bfloat16: 1 gathers each once,
                 2 once more for the backward pass
    activations  reduced over `tensor`, in the bytes of an array [examples, tokens, features] in bfloat16: Megatron-LM
                 (arXiv 1909.08053) has four in a layer, and the embedding and the head have some
    gradients    reduced over `fsdp`, in the unit of `gathers`: 1 in bfloat16, 2 in float32; a table that is looked up
                 has none but those of products with it, as its looked-up rows are exchanged
"""

import json
from typing import NamedTuple

import pytest

from tests.chips.programs import (
    BUDGETED,
    EVERY,
    EXPERTS,
    LARGER,
    REPLICATED,
    RESULTS,
    SMALL_BATCH,
    SMALL_LENGTH,
    SQUARE,
    TINY,
    fingerprint,
)

FOUND = json.loads(RESULTS.read_text())
FEATURES, BFLOAT16 = 256, 2
SLACK = 1.01
TINY_TABLE, LARGER_TABLE = (json.loads(one)["vocab_size"] * json.loads(one)["hidden_size"] for one in (TINY, LARGER))


class Budget(NamedTuple):
    """The most that a step moves; see the module."""

    gathers: float
    activations: float
    gradients: float


BUDGETS = {
    "gpt2, h100:8": Budget(1.08, 11, 1.47),
    "gpt2, v5e:2x4": Budget(1.05, 10, 1.37),
    "gemma3_text, h100:8": Budget(1.01, 11, 1.35),
    "gemma3_text, v5e:2x4": Budget(1.01, 10, 1.35),
    "mixtral, h100:8": Budget(1.39, 25, 1.01),
    "mixtral, v5e:2x4": Budget(1.37, 30, 1.01),
    "bert, h100:8": Budget(2.05, 14, 1.06),
    "bert, v5e:2x4": Budget(1.05, 14, 1.06),
    "t5, h100:8": Budget(2.01, 29, 1.12),
    "t5, v5e:2x4": Budget(1.01, 35, 1.12),
    "vit, h100:8": Budget(2.07, 8, 1.16),
    "vit, v5e:2x4": Budget(1.15, 8, 1.16),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_a_step_moves_no_more_than_its_budget(name):
    moved, mesh = FOUND[name]["moved"], BUDGETED[name].mesh
    parameters = FOUND[name]["parameters"] * BFLOAT16 / mesh["tensor"]
    activation = SMALL_BATCH // mesh["fsdp"] * SMALL_LENGTH * FEATURES * BFLOAT16
    scattered = moved["reduce-scatter over fsdp"] * mesh["fsdp"] + moved.get("all-reduce over fsdp", 0)
    found = Budget(
        moved["all-gather over fsdp"] / parameters, moved["all-reduce over tensor"] / activation, scattered / parameters
    )
    over = {key: value for key, value in found._asdict().items() if value > SLACK * getattr(BUDGETS[name], key)}
    assert over == {}, f"{name}: {found}"
    assert found.gathers >= 1  # or what is read is not the gathering of parameters


@pytest.mark.parametrize("name", REPLICATED)
def test_gradients_are_scattered_within_a_replica_before_they_are_added_up_over_replicas(name):
    """Over `data`, whose links are the slowest, a shard of each; nothing but vectors over both axes at once."""
    moved, fsdp = FOUND[name]["moved"], REPLICATED[name].mesh["fsdp"]
    parameters = FOUND[name]["parameters"] * BFLOAT16
    table = TINY_TABLE * BFLOAT16  # whose gradient is that of exchanged rows
    assert moved["reduce-scatter over fsdp"] * fsdp > 0.8 * (parameters - table)
    assert 0 < moved["all-to-all over fsdp"] < table
    assert moved["all-reduce over data"] < 1.2 * parameters / fsdp
    assert moved["all-reduce over data+fsdp"] < 0.01 * parameters


@pytest.mark.parametrize("name", SQUARE)
def test_gradients_are_scattered_over_a_square_torus_too(name):
    """Along rings of eight, then of the other eight: an eighth and a 64th of each gradient arrive.

    Those of the table are exchanged. What is all-reduced are gathers of small weights, which XLA makes sums of.
    """
    scattered = (FOUND[name]["parameters"] - LARGER_TABLE) * BFLOAT16
    assert FOUND[name]["moved"]["reduce-scatter over fsdp"] == pytest.approx((1 / 8 + 1 / 64) * scattered, rel=0.02)


@pytest.mark.parametrize(("name", "arrives"), [*zip(EXPERTS, (1 / 64, 1 / 8 + 1 / 64), strict=True)])
def test_gradients_of_experts_are_scattered_too(name, arrives):
    """Though a branch has products with them, too; on the torus along rings. For the rest see the test above."""
    moved, parameters = FOUND[name]["moved"], FOUND[name]["parameters"] * BFLOAT16
    scattered = parameters - LARGER_TABLE * BFLOAT16
    assert moved["reduce-scatter over fsdp"] == pytest.approx(arrives * scattered, rel=0.03)
    assert moved["all-gather over fsdp"] < 2 * parameters
    assert FOUND[name]["sent"] < 3 * parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETED | REPLICATED | SQUARE | EXPERTS)
def test_the_program_is_the_one_that_was_compiled(name):
    program = EVERY[name]
    assert FOUND[name]["fingerprint"] == fingerprint(program), "run make test-chips, and commit results.json"
