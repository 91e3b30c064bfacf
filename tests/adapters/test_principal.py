"""PiSSA: the same factors as PEFT's, and a path that begins as nothing beside weights that stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.merging import LowRank, merged
from redco_cli.adapters.principal import principal_factors
from redco_cli.adapters.uses import uses_of

SCALE = 1.5
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 12)), jnp.float32)


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class Linear(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.lin = torch.nn.Linear(*weight.shape, bias=False)
        self.lin.weight.data = torch.tensor(np.asarray(weight)).T.contiguous()

    def forward(self, x):
        return self.lin(x)


def of_peft(weight, init):
    """s·A0·B0 of PEFT, and what it leaves of the weight."""
    config = peft.LoraConfig(r=4, lora_alpha=4 * SCALE, target_modules=["lin"], init_lora_weights=init)
    layer = peft.get_peft_model(Linear(weight), config).base_model.model.lin
    a, b = (one["default"].weight.detach().numpy().T for one in (layer.lora_A, layer.lora_B))
    return SCALE * a @ b, layer.base_layer.weight.detach().numpy().T


def test_it_is_the_part_that_peft_takes():
    weights = drawn(2, 12, 9)
    a, b = principal_factors(weights, drawn(2, 12, 4), SCALE, None)
    for own, weight in zip(SCALE * a @ b, weights, strict=True):
        part, rest = of_peft(weight, "pissa")
        np.testing.assert_allclose(own, part, atol=1e-5)
        np.testing.assert_allclose(weight - own, rest, atol=1e-5)
    np.testing.assert_allclose((a**2).sum(-2), (b**2).sum(-1), rtol=1e-5)  # each has the root of the singular values
    nearly = SCALE * jnp.matmul(*principal_factors(weights, drawn(2, 12, 4), SCALE, 40))
    np.testing.assert_allclose(nearly, SCALE * a @ b, atol=1e-3)


@pytest.mark.parametrize("dora", [False, True])
def test_it_begins_as_the_model_and_goes_on_beside_it(dora):
    def program(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    params, how = {"w": drawn(2, 12, 12, seed=1)}, LowRank(4, SCALE)
    use = uses_of(program, params, X)["w"][0]
    a, b = principal_factors(params["w"], drawn(2, 12, 4), SCALE, None)
    factors = {"A": a, "B": b, "initial_A": a, "initial_B": b}
    if dora:
        factors["magnitude"] = jnp.linalg.norm(params["w"], axis=-2)
    adapted = jax.jit(adapting(program, {"w": how}))
    np.testing.assert_allclose(adapted(params, {"w": factors}, None, X), program(params, X), atol=1e-5)
    factors["B"] = b + 0.1 * drawn(*b.shape, seed=2)
    whole = {"w": merged(params["w"], factors, how, use)}
    if not dora:
        np.testing.assert_allclose(whole["w"], params["w"] + SCALE * a @ (factors["B"] - b), atol=1e-5)
    assert float(jnp.abs(whole["w"] - params["w"]).max()) > 0.05
    np.testing.assert_allclose(adapted(params, {"w": factors}, None, X), program(whole, X), atol=1e-4)
