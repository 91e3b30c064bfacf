"""Every covered family against PyTorch: logits, gradients, tensors there and back, and what is refused."""

import functools

import numpy as np
import pytest
import transformers
from flax.traverse_util import flatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.decoder.decoder import Decoder, abstract_params
from redco_cli.models.families.registry import families, family_of, in_old_keys
from redco_cli.models.hf_config import decoder_config
from redco_cli.models.weights.table import ignored, tensor_table, to_hf, to_params
from tests.models.decoder.pairs import (
    LIKE_OTHERS,
    batch,
    hf_config,
    largest_difference,
    logits_of,
    pair,
    redco_results,
    torch_results,
    where,
    worst_gradient,
)

SHORT = {"max_position_embeddings": 8}
LONG_FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
YARN_SHARPNESS = {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 4.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}


def nonsense(rope_type, **settings):
    return {"rope_type": rope_type, "factor": 4.0, **settings}


def scaled(rope_type, **settings):
    return SHORT | {"rope_scaling": {"rope_type": rope_type, "factor": 4.0, **settings}}


CASES = [
    pytest.param(
        family.model_type, changed, marks=() if number == bool(family.variants) and is_quick else pytest.mark.slow
    )
    for family in families().values()
    for is_quick in [family.model_type not in LIKE_OTHERS]
    for number, changed in enumerate(({}, *family.variants))
]
"""Every family's example and its variants; in every run of the tests the first variant of those unlike others."""
ROPE_CASES = [
    ("linear", {}),
    ("dynamic", {}),
    ("yarn", {"original_max_position_embeddings": 4}),
    ("yarn", YARN_SHARPNESS),
    ("yarn", {"attention_factor": 1.5}),
    ("llama3", LLAMA3),
    ("longrope", LONG_FACTORS),
]


def check(family, changed):
    """Logits within 1e-4 and gradients within 1e-3 of PyTorch's, and tensors that come back as they were."""
    models, given = pair(family, **changed), batch()
    expected, expected_grads = torch_results(models, given)
    found, grads = redco_results(models, given)
    assert largest_difference(found, expected, given) < 1e-4
    error, path = worst_gradient(grads, expected_grads)
    assert error < 1e-3, path
    back = to_hf(models.params, models.config)
    assert {name for name in models.state if not ignored(models.config, name)} == set(back)
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, models.state[name], err_msg=name, strict=True)


@pytest.mark.parametrize(("family", "changed"), CASES)
def test_a_model_equals_pytorch(family, changed):
    check(family, changed)


@pytest.mark.slow
@pytest.mark.parametrize(("rope_type", "settings"), ROPE_CASES)
def test_every_rope_scaling_equals_pytorch(rope_type, settings):
    check("llama", scaled(rope_type, **settings))


@functools.cache
def plain_logits():
    return torch_results(pair("llama"), batch())[0]


@pytest.mark.parametrize(("rope_type", "settings"), ROPE_CASES)
def test_rope_scaling_changes_the_logits(rope_type, settings):
    """And as PyTorch's does, here without gradients, on sequences beyond the length of pre-training."""
    models, given = pair("llama", **scaled(rope_type, **settings)), batch()
    expected, _ = torch_results(models, given)
    assert largest_difference(logits_of(models, given.input_ids, given.attention_mask), expected, given) < 1e-4
    assert largest_difference(expected, plain_logits(), given) > 1e-3


def test_a_short_sequence_leaves_dynamic_and_longrope_as_they_are():
    for rope_type, settings in (("dynamic", {}), ("longrope", LONG_FACTORS)):
        models, given = pair("llama", **scaled(rope_type, **settings)), batch(length=7)
        expected, _ = torch_results(models, given)
        assert largest_difference(logits_of(models, given.input_ids, given.attention_mask), expected, given) < 1e-4


@pytest.mark.parametrize("family", families())
def test_the_table_fills_every_parameter_once(family):
    config = decoder_config(hf_config(family), where=where)
    ours = flatten_dict(abstract_params(Decoder(config)))
    filled = [path for row in tensor_table(config) for path in row.paths]
    assert sorted(filled) == sorted(ours)
    for row in tensor_table(config):
        assert {row.put_together(tuple(np.zeros(shape) for shape in row.shapes)).shape} == {row.stored_shape}
        for path, shape in zip(row.paths, row.shapes, strict=True):
            assert row.counts + shape == ours[path].shape


@pytest.mark.parametrize(
    ("family", "changed"), [("gpt2", {}), ("opt", {}), ("bloom", {}), ("falcon", {}), ("phi3", {}), ("mixtral", {})]
)
def test_tensors_of_a_bare_model_are_found_without_their_prefix(family, changed):
    config = decoder_config(hf_config(family, **changed), where=where)
    rng = np.random.default_rng(0)
    random = {
        path: rng.normal(size=leaf.shape).astype(np.float32)
        for path, leaf in flatten_dict(abstract_params(Decoder(config)), sep="/").items()
    }
    params = to_params(to_hf(unflatten(random), config), config)
    bare = {name.removeprefix("transformer.").removeprefix("model."): t for name, t in to_hf(params, config).items()}
    for path, leaf in flatten_dict(to_params(bare, config), sep="/").items():
        np.testing.assert_array_equal(leaf, random[path], strict=True)


def unflatten(flat):
    tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def test_a_tensor_that_is_missing_or_does_not_fit_is_named():
    models, name = pair("llama"), "model.layers.1.mlp.up_proj.weight"
    for change, found in (({name: np.zeros((32, 1), np.float32)}, "has shape [32, 1]"), ({}, "is missing")):
        state = {key: tensor for key, tensor in models.state.items() if key != name} | change
        with pytest.raises(ModelError) as raised:
            to_params(state, models.config)
        assert str(raised.value) == (
            f"{name}: the tensor {found}; it should be [32, 24]\n  -> choose weights that fit the config"
        )


def test_what_is_covered():
    assert family_of("llama").model_type == "llama"
    assert family_of("bert") is None
    with pytest.raises(ModelError) as raised:
        decoder_config(transformers.BertConfig(), where=where)
    assert str(raised.value) == (
        f"recipe.yaml:3: model_type: bert is not covered by the decoder\n  -> it covers: {', '.join(families())}"
    )


NOT_SUPPORTED = [
    ("llama", "attention_chunk_size", 2, "nothing here computes it"),
    ("opt", "layerdrop", 0.1, "no layer is left out in training"),
    ("opt", "layer_norm_elementwise_affine", False, "norms have scales and biases"),
    ("bloom", "apply_residual_connection_post_layernorm", True, "residuals are taken before the norms"),
    ("mixtral", "router_jitter_noise", 0.1, "routing has no noise"),
    ("mixtral", "output_router_logits", True, "the loss has no part for the router"),
    ("gemma3_text", "use_bidirectional_attention", True, "a token sees only what is before it"),
    ("gpt_oss", "swiglu_limit", 5.0, "transformers clamps at 7 whatever it says"),
    ("falcon", "hidden_dropout", 0.1, "Falcon drops other things than the other families"),
]
IS_SET = [
    ("llama", "clip_qkv", 8.0, "queries, keys and values are not clipped"),
    ("gpt2", "add_cross_attention", True, "it has no encoder to look at"),
    ("llama", "quantization_config", {"bits": 4}, "quantised weights are not read"),
    ("llama", "pruned_heads", {0: [1]}, "heads are not pruned"),
]


def refusal(family, **changed):
    """The error of a config that is changed after it was made, so that its class does not check it first."""
    config = hf_config(family)
    for key, value in changed.items():
        setattr(config, key, value)
    with pytest.raises(ModelError) as raised:
        decoder_config(config, where=where)
    return str(raised.value)


@pytest.mark.parametrize(("family", "key", "value", "reason"), NOT_SUPPORTED)
def test_a_setting_that_is_not_honoured_is_refused(family, key, value, reason):
    shown = str(value).lower()
    assert refusal(family, **{key: value}) == (
        f"recipe.yaml:3: {key}: {family} with {key}: {shown} is not supported: {reason}\n"
        "  -> choose a model without this setting"
    )


@pytest.mark.parametrize(("family", "key", "value", "reason"), IS_SET)
def test_what_no_family_has_is_refused(family, key, value, reason):
    assert refusal(family, **{key: value}) == (
        f"recipe.yaml:3: {key}: {key} is set, but {reason}\n  -> choose a model without this setting"
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_key_value_heads", 4, "4 key and value heads do not divide 6 heads"),
        ("vocab_size", 0, "vocab_size must be a positive number, not 0"),
        ("vocab_size", None, "vocab_size must be a positive number, not None"),
        ("head_dim", -8, "head_dim must be a positive number, not -8"),
        ("rms_norm_eps", None, "rms_norm_eps must be a number, not None"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a number, not nan"),
        ("qwen2 layer_types", 2, "layer_types must be a list, not 2"),
        ("smollm3 no_rope_layers", 2, "no_rope_layers must be a list, not 2"),
        ("rope_theta", 0, "rope_theta must be above 0, not 0"),
        ("rope_theta", None, "rope_theta must be a number, not None"),
        ("mistral rope_scaling", "linear", "rope_scaling must be a mapping, not 'linear'"),
        ("rope_scaling", {"rope_type": "linear"}, "rope_scaling of type linear is damaged: KeyError('factor')"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": "2"},
            """rope_scaling of type linear is damaged: TypeError("factor must be a number, not '2'")""",
        ),
        (
            "rope_scaling",
            nonsense("linear", factor=0),
            "rope_scaling of type linear makes no sense: factor must be positive, not 0",
        ),
        (
            "rope_scaling",
            nonsense("llama3", **LLAMA3 | {"low_freq_factor": 4.0}),
            "rope_scaling of type llama3 makes no sense: high_freq_factor must be above low_freq_factor",
        ),
        (
            "rope_scaling",
            nonsense("yarn", beta_fast=-1.0),
            "rope_scaling of type yarn makes no sense: rope_theta must be above 1, beta_fast and beta_slow positive",
        ),
        (
            "rope_scaling",
            nonsense("linear", rope_theta=5.0),
            "rope_theta is 10000, and 5.0 in rope_scaling",
        ),
        ("phi3 partial_rotary_factor", 0.25, "1 dims of a head cannot turn in pairs"),
        ("gptj rotary_dim", 3, "3 of 4 dims cannot turn in pairs"),
        ("gptj rotary_dim", 6, "6 of 4 dims cannot turn in pairs"),
        ("gemma2 query_pre_attn_scalar", 0, "query_pre_attn_scalar must be above 0, not 0"),
        ("gemma2 attn_logit_softcapping", "50", "attn_logit_softcapping must be a number, not '50'"),
        ("gemma2 final_logit_softcapping", 0.0, "final_logit_softcapping must be above 0, not 0"),
        ("granite logits_scaling", 0.0, "logits_scaling must be above 0, not 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(key, value, problem):
    *family, key = key.split()
    place, text, remedy = refusal(*family or ["llama"], **{key: value}).partition(problem)
    assert (place, text) == (f"recipe.yaml:3: {key}: ", problem)
    assert remedy in ("\n  -> correct it", "\n  -> correct the config", f"\n  -> correct {key}")


NEW_KEYS = [
    ("llama", {"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    ("qwen2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
    ("olmo2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
    (
        "gpt_neox",
        {"rotary_pct": 1.0, "rotary_emb_base": 300},
        {"rope_type": "default", "rope_theta": 300, "partial_rotary_factor": 1.0},
    ),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", **LONG_FACTORS},
            "partial_rotary_factor": 0.5,
            "hidden_size": 48,
            "original_max_position_embeddings": 8,
        },
        {"rope_type": "longrope", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 8, **LONG_FACTORS},
    ),
    (
        "gemma3_text",
        {"rope_theta": 70.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 50.0},
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 70.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
]


@pytest.mark.parametrize(("family", "old", "new"), NEW_KEYS)
def test_ropes_as_transformers_5_writes_them_are_those_of_4(family, old, new):
    """Reading gives one decoder config, and what is written has the old keys, which both versions read."""
    sizes = {key: value for key, value in old.items() if key in ("hidden_size", "original_max_position_embeddings")}
    theirs, ours = hf_config(family, **old), hf_config(family, **sizes, rope_parameters=new)
    assert decoder_config(ours, where=where) == decoder_config(theirs, where=where)
    assert decoder_config(ours, where=where) != decoder_config(hf_config(family, **sizes), where=where)
    assert in_old_keys(ours, where=where).to_dict() == theirs.to_dict()
    assert ours.rope_parameters == new


@pytest.mark.parametrize(
    ("family", "given", "problem"),
    [
        ("llama", {"full_attention": {"rope_theta": 3.0}}, "all layers have the same rotary positions"),
        (
            "llama",
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
            "is not max_position",
        ),
        ("gemma3_text", {"rope_type": "default"}, "KeyError('sliding_attention')"),
        ("phi3", {"rope_type": "longrope", "factor": 2.0, **LONG_FACTORS}, "longrope has a factor"),
    ],
)
def test_ropes_that_the_old_keys_cannot_say_are_refused(family, given, problem):
    text = refusal(family, rope_parameters=given)
    assert text.startswith("recipe.yaml:3: rope_parameters: ")
    assert problem in text


def test_rope_parameters_do_not_contradict_rope_scaling():
    scaling = {"rope_type": "linear", "factor": 2.0}
    text = refusal("llama", rope_scaling=scaling, rope_parameters=scaling | {"factor": 3.0})
    assert "ValueError(\"rope_scaling is {'rope_type': 'linear', 'factor': 2.0}\")" in text


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hidden_act", "laplace", "there is no activation 'laplace'"),
        ("hidden_act", ["silu"], "there is no activation ['silu']"),
        ("partial_rotary_factor", 0.5, "llama turns all dims of a head, not 0.5 of them"),
        ("rope_scaling", {"rope_type": "spiral"}, "rope_scaling has the unknown type 'spiral'"),
    ],
)
def test_an_unknown_choice_is_refused(key, value, problem):
    assert refusal("llama", **{key: value}).splitlines()[0] == f"recipe.yaml:3: {key}: {problem}"


def test_falcons_key_heads_must_be_those_of_its_architecture():
    assert refusal("falcon", multi_query=False, num_kv_heads=2) == (
        "recipe.yaml:3: num_kv_heads: without multi_query there are 6 of them, not 2\n  -> correct the config"
    )


def test_blooms_sums_without_biases_are_refused():
    assert refusal("bloom", slow_but_exact=True, pretraining_tp=2) == (
        "recipe.yaml:3: slow_but_exact: bloom with slow_but_exact: true is not supported: biases are added, which "
        "transformers then leaves out\n  -> choose a model without this setting"
    )


def test_layers_with_an_mlp_stand_where_pytorch_has_them():
    def dense(**changed):
        config = decoder_config(hf_config("qwen3_moe", num_hidden_layers=4, **changed), where=where)
        return config.dense_layers if config.experts else "all"

    assert dense() == dense(mlp_only_layers=[9]) == ()
    assert dense(mlp_only_layers=[0, 2]) == (0, 2)
    assert dense(decoder_sparse_step=2) == (0, 2)
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == dense(mlp_only_layers=[0, 1, 2, 3]) == "all"
    assert refusal("qwen3_moe", mlp_only_layers=0) == (
        "recipe.yaml:3: mlp_only_layers: mlp_only_layers must be a list of layers, not 0\n  -> correct it"
    )


def test_what_hub_configs_hold_besides_is_no_obstacle():
    """Settings of published config.json files that no code reads, and others that none of this model type does."""
    published = [
        ("opt", {"activation_dropout": 0.1, "prefix": "</s>", "output_projection": True}),
        ("bloom", {"offset_alibi": 100, "seq_length": 2048, "unk_token_id": 0, "masked_softmax_fusion": True}),
        ("gpt2", {"n_ctx": 1024, "task_specific_params": {"text-generation": {"max_length": 50}}}),
        ("gptj", {"rotary": True, "n_ctx": 1024, "gradient_checkpointing": False, "scale_attn_weights": True}),
        ("llama", {"pretraining_tp": 2, "torch_dtype": "bfloat16", "_name_or_path": "x"}),
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
        ("llama", {"is_decoder": True, "activation": "swiglu", "_flash_attn_2_enabled": True}),
        ("qwen2", {"use_mrope": False, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}),
        ("gpt2", {"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("gptj", {"attention_dropout": 0.1, "hidden_dropout": 0.1, "new_trick": 2}),
        ("mixtral", {"layer_types": ["full_attention"] * 2, "original_max_position_embeddings": 8}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "auto_map": {"AutoConfig": "x"}}),
        ("starcoder2", {"mlp_type": "default", "norm_type": "layer_norm", "activation_function": "gelu"}),
        ("smollm3", {"max_window_layers": 28}),
        ("gpt_oss", {"swiglu_limit": 7.0, "experts_per_token": 4, "initial_context_length": 4096}),
        ("gemma2", {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
        ("falcon", {"apply_residual_connection_post_layernorm": False, "auto_map": {"AutoConfig": "x"}}),
    ]
    for family, extra in published:
        plain = decoder_config(hf_config(family), where=where)
        assert decoder_config(hf_config(family, **extra), where=where) == plain
