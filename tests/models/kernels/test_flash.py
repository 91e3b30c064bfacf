"""Attention by our kernels for GPUs, interpreted, against formulas; and where they stand for cuDNN's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.chips.target import parse_target, targeting
from redco_cli.models.decoder.model import build_decoder
from redco_cli.models.hf_config import decoder_config
from redco_cli.models.kernels.flash import attend as flash
from redco_cli.models.kernels.flash import blocks
from redco_cli.sharding.program.flops import count_products
from tests.models.decoder.pairs import QUICK, hf_config, where
from tests.models.kernels.test_splash import CASES, LENGTH, compare_with_one_device, decoder, losses, normal, rows

HIDDEN = -1e30


def formula(q, k, v, segments, sinks, bias=None, *, window, softcap):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores if softcap is None else jnp.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias[:, :, None]
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.where(seen, scores, HIDDEN)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=3)
    weights = jax.nn.softmax(scores, axis=3)[..., : q.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def packed(length):
    """A row of four texts and padding behind them, and one with padding among them."""
    segments = np.zeros((2, length), np.int32)
    segments[0, 70:], segments[0, 190:], segments[0, 200:], segments[0, 280:] = 1, 2, 3, -1
    segments[1, 10:40], segments[1, 150:] = -1, 5
    return jnp.asarray(segments)


@pytest.mark.parametrize(
    ("dims", "window", "softcap", "is_packed", "has_sinks"),
    [
        pytest.param(16, None, None, True, False, marks=pytest.mark.slow),
        (16, 150, 3.0, True, True),
        pytest.param(8, None, None, False, False, marks=pytest.mark.slow),
        pytest.param(24, None, None, True, False, marks=pytest.mark.slow),
        pytest.param(16, 40, None, True, False, marks=pytest.mark.slow),
        pytest.param(16, 1, None, False, True, marks=pytest.mark.slow),
        pytest.param(96, 130, 2.0, False, False, marks=pytest.mark.slow),
        pytest.param(256, 130, None, True, True, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_softmax_of_the_scores(dims, window, softcap, is_packed, has_sinks):
    length = 300
    q = normal(2, length, 4, dims) * dims**-0.5
    k, v, weights = normal(2, length, 2, dims), normal(2, length, 2, dims), normal(2, length, 4, dims)
    segments, sinks = packed(length) if is_packed else None, normal(4) if has_sinks else None
    bias = normal(1, 4, length) if window else None
    wanted = (0, 1, 2, 3) if has_sinks else (0, 1, 2)

    def loss(attend, *given):
        return (attend(*given[:3], segments, given[3], bias, window=window, softcap=softcap) * weights).sum()

    (found, gradients), (expected, right) = (
        jax.jit(jax.value_and_grad(functools.partial(loss, attend), wanted), compiler_options=QUICK)(q, k, v, sinks)
        for attend in (flash.attend, formula)
    )
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-4)  # a sum of some 10^5 products
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-4), gradients, right)


def test_texts_that_meet_nowhere_are_left_out():
    segments = jnp.repeat(jnp.asarray([[0, 1, 2, 2]]), 128, axis=1)
    of_queries = blocks.Blocks(queries=128, keys=64, warps=4)
    np.testing.assert_array_equal(blocks.first_keys(segments, of_queries), [[0, 2, 4, 4]])
    of_keys = blocks.Blocks(queries=64, keys=128, warps=4)
    np.testing.assert_array_equal(blocks.last_queries(segments, of_keys), [[2, 4, 8, 8]])


CUDNN, FLASH = {"dot_product_attention"}, {"flash_forward", "flash_backward_dkv", "flash_backward_dq"}


def kernels(target, case, given, **changes):
    """Of the gradient of a decoder's states, as it is traced in 16 bits for a chip."""
    with targeting(parse_target(target, "--target")):
        config = hf_config(case, **changes)
        options = {"generation_config": None, "where": where("model.name")}
        model = build_decoder(decoder_config(config, where=where), config=config, dtype="bfloat16", **options)
        numbers = {given: jnp.ones((2, 256), jnp.int32)} if given else {}

        def total(params):
            return model.hidden(params, jnp.ones((2, 256), jnp.int32), **numbers).astype(jnp.float32).sum()

        text = str(jax.make_jaxpr(jax.grad(total))(model.abstract))
    return {name for name in CUDNN | FLASH if name in text}


@pytest.mark.parametrize(
    ("expected", "target", "case", "given", "changes"),
    [
        (CUDNN, "h100:1", "llama", None, {"head_dim": 8}),
        (CUDNN, "h100:1", "llama", "attention_mask", {"head_dim": 8}),  # behind the tokens, where none sees it
        (FLASH, "h100:1", "llama", "segment_ids", {"head_dim": 8}),
        (CUDNN, "h100:1", "mistral", None, {"head_dim": 8, "sliding_window": 17}),
        (FLASH, "h100:1", "mistral", "attention_mask", {"head_dim": 8, "sliding_window": 17}),
        (FLASH, "a100:1", "gemma2", None, {}),  # bounded scores
        pytest.param(FLASH, "a100:1", "gpt_oss", None, {}, marks=pytest.mark.slow),  # sinks
        (FLASH, "a100:1", "llama", None, {"head_dim": 256}),  # no gradient of cuDNN's before Hopper
        (CUDNN, "h100:1", "llama", None, {"head_dim": 256}),
        (FLASH, "h100:1", "bloom", None, {"hidden_size": 48}),  # ALiBi
    ],
)
def test_cudnn_computes_what_it_can_be_told(expected, target, case, given, changes):
    assert kernels(target, case, given, max_position_embeddings=256, **changes) == expected


def test_what_is_computed_is_counted():
    x = jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.float32)
    attend = functools.partial(flash.attend, softcap=None, segments=None, sinks=None)
    whole = 2 * 2 * 2 * 256 * 256 * 16
    assert count_products(functools.partial(attend, window=None), x, x, x).attention == whole // 2
    assert count_products(functools.partial(attend, window=64), x, x, x).attention == whole // 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_models_are_those_of_the_plain_form(case):
    module, params = decoder(case)
    ids, mask, segments = rows(4)
    weights = normal(LENGTH, module.config.hidden_size)
    (expected, wanted), (value, found) = (
        jax.jit(jax.value_and_grad(losses(module.clone(kernel=kernel), weights)), compiler_options=QUICK)(
            params, ids, jnp.asarray(mask), segments
        )
        for kernel in ("plain", "flash")
    )
    np.testing.assert_allclose(value, expected, rtol=3e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5 * largest), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1)])
def test_every_mesh_gives_what_one_device_gives(sizes):
    compare_with_one_device("gpt_oss", "flash", sizes)
