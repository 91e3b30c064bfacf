"""The decoder itself: padding, packing, caches, recomputation, attention kernels, dropout, loss without logits."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_cli.errors import ModelError
from redco_cli.models.decoder import attention as decoder_attention
from redco_cli.models.decoder.cache import empty_cache
from redco_cli.models.decoder.config import ExpertsConfig
from redco_cli.models.decoder.decoder import Decoder, squash
from redco_cli.models.decoder.experts import mix as experts_mix
from redco_cli.models.decoder.experts.layer import routing
from redco_cli.models.decoder.experts.mix import Kernels, mix
from redco_cli.models.decoder.loss import Head, cross_entropy
from redco_cli.models.decoder.model import build_decoder
from redco_cli.models.decoder.positions import alibi_bias, alibi_slopes
from redco_cli.models.hf_config import decoder_config
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.parts import next_token_loss
from tests.models.decoder.pairs import (
    QUICK,
    Batch,
    abstract_decoder,
    batch,
    hf_config,
    largest_difference,
    logits_of,
    pair,
    torch_results,
    where,
)


def decoder(family="llama", **changed):
    """A decoder and parameters in which nothing is zero or one."""
    module, abstract = abstract_decoder(hf_config(family, **changed))
    rng = np.random.default_rng(0)
    return module, jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype), abstract)


def quick(function, **named):
    return jax.jit(function, compiler_options=QUICK, **named)


@functools.cache
def compiled(module):
    return quick(module.apply, static_argnames="method")


def apply(module, params, *inputs, **named):
    return np.asarray(compiled(module)({"params": params}, *inputs, **named))


def first(default, *others):
    """The default cases, and those that only the slow tests run."""
    return [*default, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


@pytest.mark.parametrize("family", first(["bloom", "opt"], "llama", "gemma2"))
def test_the_side_of_the_padding_does_not_matter(family):
    """Where positions are relative or counted from the first real token, a text is the same on either side."""
    module, params = decoder(family)
    text = batch().input_ids[:1]
    gap = np.full((1, 5), 3, np.int32)
    left, right = np.concatenate([gap, text], 1), np.concatenate([text, gap], 1)
    mask = np.concatenate([np.zeros_like(gap), np.ones_like(text)], 1)
    alone = apply(module, params, text)
    np.testing.assert_allclose(apply(module, params, left, mask)[:, 5:], alone, atol=1e-5)
    np.testing.assert_allclose(apply(module, params, right, mask[:, ::-1])[:, :-5], alone, atol=1e-5)


def test_learned_positions_count_padding_as_pytorch_does():
    models, given = pair("gpt2"), batch()
    expected, _ = torch_results(models, given)
    assert largest_difference(logits_of(models, given.input_ids, given.attention_mask), expected, given) < 1e-4
    unmasked = logits_of(models, given.input_ids)
    assert largest_difference(unmasked, expected, given) > 1e-2


@pytest.mark.parametrize("family", first(["gemma2"], "llama", "bloom", "gpt2", "mixtral"))
def test_texts_in_one_row_do_not_see_each_other(family):
    module, params = decoder(family)
    ids = batch().input_ids
    one, two = ids[:1, :7], ids[1:2, :5]
    row = np.concatenate([one, two], 1)
    segments = np.array([[1] * 7 + [2] * 5])
    positions = np.array([[*range(7), *range(5)]])
    packed = apply(module, params, row, positions=positions, segment_ids=segments)
    np.testing.assert_allclose(packed[:, :7], apply(module, params, one), atol=1e-5)
    np.testing.assert_allclose(packed[:, 7:], apply(module, params, two), atol=1e-5)
    assert np.abs(packed[:, 7:] - apply(module, params, row)[:, 7:]).max() > 1e-2


MIXED = {"mlp_only_layers": [1], "num_hidden_layers": 3}


@pytest.mark.parametrize("family", first(["gemma3_text", "opt"], "llama", "bloom", "gptj", "gpt_oss", "qwen3_moe"))
def test_decoding_from_a_cache_equals_reading_at_once(family):
    module, params = decoder(family, **(MIXED if family == "qwen3_moe" else {}))
    ids, mask = batch().input_ids[1:], batch().attention_mask[1:].copy()
    mask[0] = 1
    whole = apply(module, params, ids, mask)
    cache = empty_cache(module.config, 2, 12, jnp.float32)
    step = quick(lambda *inputs: module.apply({"params": params}, *inputs, method="decode"))
    hidden = []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
        states, cache = step(ids[:, start:end], cache, mask)
        hidden.append(states)
    assert int(cache.length) == 12
    logits = apply(module, params, jnp.concatenate(hidden, 1), method="logits")
    np.testing.assert_allclose(logits[mask.astype(bool)], whole[mask.astype(bool)], atol=1e-5)


def value_and_grads(module, params, given):
    def weighted(params):
        return (module.apply({"params": params}, given.input_ids, given.attention_mask) * given.weights).sum()

    return quick(jax.value_and_grad(weighted))(params)


@functools.cache
def plain_value_and_grads():
    return value_and_grads(*decoder("llama"), batch())


@pytest.mark.parametrize(
    "options",
    first(
        [{"remat": "full"}, {"kernel": "xla"}],
        {"remat": "dots"},
        {"remat": "attention"},
        {"remat": "offload"},
        {"unroll": 2},
        {"unroll": 2, "remat": "full"},
        {"layer_params": lambda params: jax.tree.map(lambda leaf: leaf * 1.0, params), "remat": "full"},
    ),
    ids=lambda options: " ".join(options),
)
def test_how_it_is_computed_changes_nothing(options):
    module, params = decoder("llama")
    given = batch()
    value, grads = plain_value_and_grads()
    other_value, other_grads = value_and_grads(module.clone(**options), params, given)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=2e-4), other_grads, grads)


@pytest.mark.parametrize("family", first(["gemma3_text"], "gpt2", "bloom", "gpt_oss"))
def test_the_kernel_of_jax_sees_scales_biases_and_windows(family):
    module, params = decoder(family, **({"scale_attn_by_inverse_layer_idx": True} if family == "gpt2" else {}))
    given = batch()
    plain, other = (
        apply(module.clone(kernel=kernel), params, given.input_ids, given.attention_mask) for kernel in ("plain", "xla")
    )
    np.testing.assert_allclose(other[given.real], plain[given.real], atol=1e-5)


WINDOWS = [("mistral", None), ("mistral", 3), ("gemma3_text", 3)]


@pytest.mark.parametrize(("family", "window"), WINDOWS)
def test_the_kernel_of_jax_is_told_of_order_and_window(family, window, monkeypatch):
    """Where nothing else hides keys, it gets no mask, and the same comes out: also where windows differ by layer."""
    module, params = decoder(family, sliding_window=window)
    windows, attend = set(), jax.nn.dot_product_attention

    def recorded(q, k, v, bias, mask, **named):
        windows.add((bias, mask, named["is_causal"], named["local_window_size"]))
        return attend(q, k, v, bias, mask, **named)

    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    plain, other = (apply(module.clone(kernel=kernel), params, batch().input_ids) for kernel in ("plain", "xla"))
    np.testing.assert_allclose(other, plain, atol=1e-5)
    sizes = {size and (size - 1, 0) for size in module.config.windows}
    assert windows == {(None, None, True, size) for size in sizes}
    assert len(sizes) == 1 + (family == "gemma3_text")


@pytest.mark.parametrize("family", first(["opt"], "llama", "gpt2", "mixtral"))
def test_the_kernel_of_jax_gets_no_mask_wherever_the_padding_is(family, monkeypatch):
    masks, attend = [], jax.nn.dot_product_attention

    def recorded(q, k, v, bias, mask, **named):
        masks.append(mask)
        return attend(q, k, v, bias, mask, **named)

    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    module, params = decoder(family, **({"sliding_window": None} if family == "mixtral" else {}))
    given = batch()
    mask = np.concatenate([given.attention_mask, [[0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1]], [[0] * 12]])
    ids, real = np.concatenate([given.input_ids, given.input_ids[:2]]), mask.astype(bool)
    plain, other = (apply(module.clone(kernel=kernel), params, ids, mask) for kernel in ("plain", "xla"))
    np.testing.assert_allclose(other[real], plain[real], atol=1e-5)
    assert masks == [None] * len(masks)
    assert masks


@pytest.mark.parametrize("family", first(["gemma3_text"], "bloom", "llama"))
def test_queries_in_blocks_see_what_they_see_at_once(family, monkeypatch):
    module, params = decoder(family)
    given = batch()
    segments = np.cumsum(given.input_ids % 5 == 0, axis=1)
    named = {"segment_ids": segments, "positions": np.broadcast_to(np.arange(12), (3, 12))}
    results = []
    for smallest in (64, 5):  # 12 queries at once, and as 5, 5 and 2
        monkeypatch.setattr(decoder_attention, "_SMALLEST_BLOCK", smallest)
        traced = jax.make_jaxpr(lambda params: module.apply({"params": params}, given.input_ids))(params)
        assert str(traced).count("exp ") == {64: 1, 5: 3}[smallest]
        run = quick(lambda params: module.apply({"params": params}, given.input_ids, given.attention_mask, **named))
        results.append(np.asarray(run(params))[given.real])
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)


def saved_bytes(remat):
    module, params = decoder("llama", num_hidden_layers=4)
    module = module.clone(remat=remat)
    ids = np.zeros((4, 64), np.int32)
    _, kept = jax.eval_shape(lambda params: jax.vjp(lambda p: module.apply({"params": p}, ids), params), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def test_what_is_recomputed_is_not_kept():
    none, dots, full = (saved_bytes(remat) for remat in ("none", "dots", "full"))
    assert full < dots / 2 < none / 4


def test_layer_params_gets_one_layer_and_changes_what_is_used():
    module, params = decoder("llama")
    shapes = []

    def double_values(layer):
        shapes.append(layer["attention"]["v"]["kernel"].shape)
        attention = layer["attention"] | {"v": {"kernel": 2 * layer["attention"]["v"]["kernel"]}}
        return layer | {"attention": attention}

    changed = apply(module.clone(layer_params=double_values), params, batch().input_ids)
    doubled = jax.tree.map(lambda leaf: leaf, params)
    doubled["layers"]["attention"]["v"]["kernel"] = 2 * params["layers"]["attention"]["v"]["kernel"]
    np.testing.assert_allclose(changed, apply(module, doubled, batch().input_ids), atol=1e-6)
    assert set(shapes) == {(24, 8)}


@pytest.mark.slow
def test_a_row_of_padding_has_finite_gradients():
    module, params = decoder("gemma2")
    given = batch()
    mask = given.attention_mask.copy()
    mask[2] = 0
    _, grads = value_and_grads(module, params, Batch(given.input_ids, mask, given.weights))
    assert all(bool(jnp.isfinite(grad).all()) for grad in jax.tree.leaves(grads))


TENSOR = {"q": 2, "k": 2, "v": 2, "gate": 2, "up": 2, "o": 1, "down": 1}
"""Which dim of the stacked kernels is split."""


def test_split_over_devices_it_computes_the_same_with_sums_alone():
    """Two rows of four devices: one all-reduce for each pair of products, and nothing is resharded."""
    module, params = decoder("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=32)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def place(path, leaf):
        dim = TENSOR.get(path[-2].key) if path[-1].key == "kernel" else None
        spec = PartitionSpec(*("tensor" if index == dim else None for index in range(leaf.ndim)))
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    split = jax.tree_util.tree_map_with_path(place, params)
    ids = batch(length=8).input_ids[:2]
    by_row = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    program = jax.jit(lambda params, ids: module.apply({"params": params}, ids)).lower(split, by_row).compile()
    text = program.as_text()
    assert "all-reduce" in text
    assert not re.search(r"= \S+ (all-gather|all-to-all|collective-permute|reduce-scatter)", text)
    np.testing.assert_allclose(program(split, by_row), apply(module, params, ids), atol=1e-5)


def test_half_precision_is_near_single():
    module, params = decoder("llama")
    ids = batch().input_ids
    half = compiled(module.clone(dtype=jnp.bfloat16))({"params": params}, ids)
    assert half.dtype == jnp.bfloat16
    single = apply(module, params, ids)
    assert 1e-4 < np.abs(np.asarray(half, np.float32) - single).max() < 0.05 * np.abs(single).max()


def test_every_token_reaches_its_experts_even_when_all_choose_the_same():
    module, params = decoder("mixtral")
    one = jax.tree.map(lambda leaf: leaf, params)
    one["layers"]["experts"]["router"]["kernel"] = jnp.zeros_like(params["layers"]["experts"]["router"]["kernel"])
    logits = apply(module, one, batch().input_ids)  # equal probabilities: everyone takes the first two, half each
    rest = jax.tree.map(lambda leaf: leaf, one)
    for name in ("gate", "up", "down"):
        rest["layers"]["experts"][name] = one["layers"]["experts"][name].at[:, 2:].set(jnp.nan)
    assert np.isnan(apply(module, rest, batch().input_ids)).all()  # they are computed, and count nothing
    for name in ("gate", "up", "down"):
        rest["layers"]["experts"][name] = one["layers"]["experts"][name].at[:, 2:].mul(-3.0)
    np.testing.assert_array_equal(apply(module, rest, batch().input_ids), logits)


def test_routing_chooses_and_shares():
    logits = jnp.log(jnp.array([[[0.5, 0.1, 0.3, 0.1]]]))
    config = ExpertsConfig(count=4, per_token=2, width=1, normalise=False)
    shares, chosen = routing(logits, config)
    np.testing.assert_allclose(shares, [[[0.5, 0.3]]], atol=1e-6)
    np.testing.assert_array_equal(chosen, [[[0, 2]]])
    shares, _ = routing(logits, dataclasses.replace(config, normalise=True))
    np.testing.assert_allclose(shares, [[[0.625, 0.375]]], atol=1e-6)


@pytest.mark.parametrize("least", [1, pytest.param(2**26, marks=pytest.mark.slow)], ids=["in groups", "at once"])
@pytest.mark.parametrize("crowd", first([9], 0, 32))
def test_experts_with_room_compute_what_each_token_by_itself_would(monkeypatch, crowd, least):
    """32 tokens, of which some crowd in one expert, 2 of 16 experts each: room for 8, then for 24, then for all."""
    monkeypatch.setattr(experts_mix, "_LEAST", least)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 32, 8)).astype(np.float32)
    shapes = (16, 8, 4), (16, 8, 4), (16, 4, 8), (16, 4), (16, 4), (16, 8)
    kernels = Kernels(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))
    first_choice = np.arange(32) % 8
    first_choice[:crowd] = 3
    chosen = np.broadcast_to(np.stack([first_choice, 8 + np.arange(32) % 8], -1), (2, 32, 2))
    shares = rng.uniform(size=(2, 32, 2)).astype(np.float32)

    def one_by_one(x, kernels, shares):
        gate, up, down, gate_bias, up_bias, down_bias = (kernel[chosen] for kernel in kernels)
        gate = jnp.einsum("bse,bsnef->bsnf", x, gate) + gate_bias
        inner = jnp.tanh(gate) * (jnp.einsum("bse,bsnef->bsnf", x, up) + up_bias)
        return jnp.einsum("bsne,bsn->bse", jnp.einsum("bsnf,bsnfe->bsne", inner, down) + down_bias, shares)

    def together(x, kernels, shares):
        return mix(x, kernels, shares, jnp.asarray(chosen), lambda gate, up: jnp.tanh(gate) * up)

    kernels = jax.tree.map(jnp.asarray, kernels)
    weights = rng.normal(size=x.shape).astype(np.float32)
    expected, found = (
        quick(jax.value_and_grad(lambda *args: (way(*args) * weights).sum(), argnums=(0, 1, 2)))(x, kernels, shares)  # noqa: B023
        for way in (one_by_one, together)
    )
    np.testing.assert_allclose(quick(together)(x, kernels, shares), quick(one_by_one)(x, kernels, shares), atol=1e-4)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-3), found, expected)


def test_slopes_of_heads_that_are_no_power_of_two():
    np.testing.assert_allclose(alibi_slopes(4), [2**-2, 2**-4, 2**-6, 2**-8], rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3], rtol=1e-6)


def test_rounded_slopes_are_rounded_in_a_compiled_program_too():
    """To bfloat16 before and after they are multiplied with positions, as Falcon's are."""
    positions = np.arange(300)[None]
    expected = alibi_slopes(12).astype(jnp.bfloat16)[:, None] * positions.astype(jnp.bfloat16)
    found = quick(functools.partial(alibi_bias, heads=12, rounded=True))(positions)
    np.testing.assert_array_equal(found[0, :, 0], expected.astype(np.float32))


def loss_case(batch_size=3, length=12, vocab_size=64, bias=True):
    """Hidden states, a head, labels of which some count nothing, and weights."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, vocab_size, (batch_size, length))
    labels[1, 4:7] = -100
    weights = rng.uniform(0.5, 2, labels.shape).astype(np.float32)
    hidden = rng.normal(size=(batch_size, length, 8)).astype(np.float32)
    kernel, offsets = rng.normal(size=(9, vocab_size)).astype(np.float32)[:8], rng.normal(size=vocab_size)
    return jnp.asarray(hidden), Head(jnp.asarray(kernel), jnp.float32(offsets) if bias else None), labels, weights


@pytest.mark.parametrize(
    ("options", "bias", "positions", "groups"),
    [
        ({}, False, 4096, 1),
        ({}, True, 5, None),
        ({"logits_softcap": 1.5, "logits_scale": 2.0}, True, None, 3),
        pytest.param({"logits_scale": 0.3}, True, 5, 3, marks=pytest.mark.slow),
        pytest.param({"logits_softcap": 1.5}, False, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_loss_in_pieces_equals_the_plain_form(options, bias, positions, groups):
    config = dataclasses.replace(decoder_config(hf_config("llama"), where=where), **options)
    hidden, head, labels, weights = loss_case(bias=bias)

    def plain(hidden, head, weights):
        logits = hidden @ head.kernel + (head.bias if bias else 0)
        logits = squash(logits * config.logits_scale, config.logits_softcap)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return (losses * weights * (labels >= 0)).sum()

    def pieces(hidden, head, weights):
        found = cross_entropy(hidden, head, labels, weights, config=config, positions=positions, groups=groups)
        return 2.0 * found.loss, (found.weight, found.correct)

    value, grads = quick(jax.value_and_grad(plain, argnums=(0, 1, 2)))(hidden, head, weights)
    run = quick(jax.value_and_grad(pieces, argnums=(0, 1, 2), has_aux=True))
    (other_value, (weight, correct)), other_grads = run(hidden, head, weights)
    np.testing.assert_allclose(other_value, 2 * value, rtol=1e-5)
    np.testing.assert_allclose(weight, weights[labels >= 0].sum(), rtol=1e-6)
    right = (hidden @ head.kernel * config.logits_scale + (head.bias * config.logits_scale if bias else 0)).argmax(-1)
    np.testing.assert_allclose(correct, weights[right == labels].sum(), rtol=1e-6)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, 2 * two, atol=1e-4), other_grads, grads)
    np.testing.assert_allclose(quick(pieces)(hidden, head, weights)[0], 2 * value, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gptj", {}),
        pytest.param("gemma2", {"final_logit_softcapping": 3.0}, marks=pytest.mark.slow),
        pytest.param("granite", {"logits_scaling": 3.0}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_a_model_is_that_of_its_logits(family, changed):
    built = model(family, **changed)
    _, params = decoder(family, **changed)
    ids = batch().input_ids
    labels = np.where(np.arange(12) % 5 == 1, IGNORED_LABEL, ids)
    weights = np.arange(ids.size, dtype=np.float32).reshape(ids.shape) % 4 / 2
    loss = quick(lambda params: built.next_token_loss(params, ids, labels=labels, weights=weights))(params)
    expected = next_token_loss(apply(built.module, params, ids), jnp.asarray(labels), jnp.asarray(weights))
    assert float(loss.weight) == float(expected.weight) == weights[:, 1:][labels[:, 1:] != IGNORED_LABEL].sum()
    np.testing.assert_allclose(loss.sum, expected.sum, rtol=1e-5)
    assert float(loss.metrics["accuracy"]) == float(expected.metrics["accuracy"])
    plain = next_token_loss(apply(built.module, params, ids), jnp.asarray(labels))
    assert (float(plain.weight), float(plain.sum) == float(loss.sum)) == (24, False)


def test_the_logits_of_the_whole_batch_never_exist():
    config = decoder_config(hf_config("llama"), where=where)
    hidden, head, labels, _ = loss_case(vocab_size=4096)

    def total(hidden, head):
        return cross_entropy(hidden, head, labels, config=config, positions=2).loss

    program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, head).compile().as_text()
    logits = [line for line in program.splitlines() if "f32[3,12,4096]" in line or "f32[36,4096]" in line]
    assert logits == []
    assert "f32[3,2,4096]" in program or "f32[6,4096]" in program


NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def model(family="gpt2", **changed):
    config = hf_config(family, **changed)
    own = decoder_config(config, where=where)
    return build_decoder(own, config=config, dtype="float32", generation_config=None, where="r.yaml:2: model")


@pytest.mark.slow
def test_the_model_is_called_like_every_named_model():
    built = model("gpt2")
    params = quick(built.init)(jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), built.abstract
    )
    given = batch()
    by_name = built(params, given.input_ids, position_ids=None, attention_mask=given.attention_mask)
    np.testing.assert_array_equal(by_name, built(params, given.input_ids, given.attention_mask))


@pytest.mark.slow
def test_dropout_needs_a_key_and_follows_it():
    built = model("gpt2")
    params = quick(built.init)(jax.random.key(0))
    ids = batch().input_ids
    with pytest.raises(ModelError) as raised:
        built(params, ids, train=True)
    assert str(raised.value) == (
        "r.yaml:2: model: training this model needs a key for dropout\n  -> pass rng= to ctx.model, as loss_fn got it"
    )
    train = quick(lambda key: built(params, ids, train=True, rng=key))
    one, again, other = (np.asarray(train(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3
    without = model("gpt2", **NO_DROPOUT)
    expected = apply(built.module, params, ids)
    assert np.abs(one - expected).max() > 1e-3
    np.testing.assert_array_equal(quick(lambda: without(params, ids, train=True))(), expected)


@pytest.mark.parametrize("rate", first(["attn_pdrop"], "embd_pdrop", "resid_pdrop"))
def test_what_dropout_does_evens_out(rate):
    """Averaged over keys, hidden states are near those without dropout; each rate by itself does something."""
    built = model("gpt2", **NO_DROPOUT | {rate: 0.3})
    params = quick(built.init)(jax.random.key(0))
    ids = batch().input_ids
    keys = jax.random.split(jax.random.key(0), 64)
    logits = np.asarray(quick(jax.vmap(lambda key: built(params, ids, train=True, rng=key)))(keys))
    assert logits.std(0).mean() > 1e-3
    assert np.abs(logits.mean(0) - apply(built.module, params, ids)).mean() < logits.std(0).mean()


@pytest.mark.parametrize(
    ("inputs", "named", "text"),
    [
        (
            (),
            {},
            "the decoder needs input_ids\n  -> its inputs are: input_ids, attention_mask, position_ids, segment_ids",
        ),
        (
            (np.zeros((1, 2), np.int32),),
            {"token_type_ids": 1},
            "the decoder takes no input token_type_ids\n"
            "  -> its inputs are: input_ids, attention_mask, position_ids, segment_ids",
        ),
        (
            (np.zeros((1, 65), np.int32),),
            {},
            "input_ids has 65 tokens, but the model has positions for 64 (max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        ),
    ],
)
def test_wrong_inputs_are_refused(inputs, named, text):
    built = model("gpt2")
    with pytest.raises(ModelError) as raised:
        built(built.abstract, *inputs, **named)
    assert str(raised.value) == f"r.yaml:2: model: {text}"


def test_there_are_no_decoder_inputs():
    with pytest.raises(ModelError) as raised:
        model("gpt2").decoder_inputs(np.zeros((1, 2)))
    assert str(raised.value) == (
        "r.yaml:2: model: a causal_lm model has no decoder_inputs\n  -> give it input_ids in loss_fn"
    )


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2_moe", "mixtral", "gemma2"])
def test_what_is_stacked_are_vectors_and_matrices(family):
    """Optimizers decay matrices and not vectors, in whatever arrays they lie."""
    found = model(family)
    for path, leaf in flatten_dict(found.abstract, sep="/").items():
        is_vector = path.endswith(("bias", "scale"))
        assert leaf.ndim - found.stacked.get(path, 0) == (1 if is_vector else 2), path


def test_an_abstract_decoder_allocates_nothing():
    """A model of 70 billion parameters, on any machine."""
    big = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    module, abstract = abstract_decoder(hf_config("llama", **big, intermediate_size=28672, vocab_size=128256))
    assert isinstance(module, Decoder)
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract)} == {jnp.dtype("float32")}
    assert abstract["layers"]["attention"]["k"]["kernel"].shape == (80, 8192, 1024)
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == 70_553_706_496


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gptj", "gemma3_text", "opt"))],
)
def test_positions_that_begin_anew_without_a_mask_are_read_as_in_pytorch(family):
    """Without a cache, as in training, most of its classes take them for another text; GPT-J and OPT do not."""
    models = pair(family)
    ids = np.random.default_rng(0).integers(3, 60, (2, 8)).astype(np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1]], np.int32)
    with torch.no_grad():
        expected = models.torch_model(
            torch.from_numpy(ids).long(), position_ids=torch.from_numpy(positions).long(), use_cache=False
        ).logits.numpy()
    named = {"dtype": "float32", "generation_config": None, "where": "here"}
    model = build_decoder(models.config, config=models.hf_config, **named)
    found = jax.jit(lambda params: model(params, ids, position_ids=positions))(models.params)
    np.testing.assert_allclose(found, expected, atol=1e-4)
