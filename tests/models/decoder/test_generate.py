"""Generation by the decoder: token for token as PyTorch, on any mesh, compiled once; what is drawn, what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from redco_cli.errors import ModelError
from redco_cli.models.decoder.model import build_decoder
from redco_cli.models.generate.scores import filtered_scores
from redco_cli.models.generate.settings import GenerationSettings
from redco_cli.models.hf_config import decoder_config
from redco_cli.models.weights.table import to_params
from tests.models.decoder.pairs import QUICK, hf_config, pair, where

NEW, PAD = 12, 1
IDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": [2, 7, 11, 23]}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
SHORT_PHI3 = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 10, "max_position_embeddings": 40}


MIXED = {"mlp_only_layers": [1], "num_hidden_layers": 3}
"""Three stacks of layers: with experts, without, with."""


def first(default, *others):
    """The default cases, and those that only the slow tests run."""
    return [*default, *(pytest.param(*other, marks=pytest.mark.slow) for other in others)]


def prompts(side="left"):
    """Three prompts of different lengths."""
    rng = np.random.default_rng(0)
    ids = np.full((3, 8), PAD, np.int32)
    mask = np.zeros_like(ids)
    for row, length in enumerate((8, 5, 3)):
        where = slice(8 - length, None) if side == "left" else slice(length)
        ids[row, where] = rng.integers(24, 60, length)
        mask[row, where] = 1
    return ids, mask


def lively(family, **changed):
    """A model in both libraries whose layers outweigh its embedding: tied ones would repeat the last token."""
    models = pair(family, **changed)
    with torch.no_grad():
        for name, parameter in models.torch_model.named_parameters():
            if parameter.ndim > 1 and not any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
                parameter.mul_(4)
    state = {name: tensor.detach().numpy() for name, tensor in models.torch_model.state_dict().items()}
    return dataclasses.replace(models, state=state, params=to_params(state, models.config))


def own(models, **options):
    generation_config = GenerationConfig(**IDS)
    named = {"dtype": "float32", "generation_config": generation_config, "where": "recipe.yaml:3: model"}
    return build_decoder(models.config, config=models.hf_config, **(named | options))


def tokens(model, params, ids, mask, **settings):
    run = jax.jit(lambda *inputs: model.generate(*inputs, **settings), compiler_options=QUICK)
    return np.asarray(run(params, ids, mask))


def both(models, **settings):
    """Tokens by PyTorch and by redco."""
    ids, mask = map(torch.from_numpy, prompts())
    settings = {"max_new_tokens": NEW, **settings}
    config = GenerationConfig(**({"do_sample": False} | IDS | settings))
    with torch.no_grad():
        expected = models.torch_model.generate(ids.long(), attention_mask=mask.long(), generation_config=config)
    expected = expected.numpy()[:, ids.shape[1] :]
    expected = np.pad(expected, ((0, 0), (0, config.max_new_tokens - expected.shape[1])), constant_values=PAD)
    found = tokens(own(models), models.params, *prompts(), **settings)
    assert len(np.unique(expected)) > 4, "the model says too little for a comparison"
    return expected, found


@pytest.mark.parametrize(
    ("family", "changed"),
    first(
        [("gemma3_text", {}), ("bloom", {}), ("opt", {})],
        ("mistral", {}),
        ("llama", {}),
        ("gemma2", {}),
        ("qwen3", {}),
        ("gpt2", {}),
        ("falcon", {}),
        ("falcon", {"alibi": True}),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("qwen3_moe", MIXED),
        ("gpt_oss", {}),
        ("olmo3", {}),
        ("smollm3", {}),
        ("gptj", {}),
        ("gpt_neox", {}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 10}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 16}),
    ),
)
def test_greedy_tokens_equal_pytorch(family, changed):
    """Prompts of different lengths, with a window that is shorter than they are, and longer than their positions."""
    expected, found = both(lively(family, **changed))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("family", "settings"),
    first(
        [("mistral", {"early_stopping": True, "length_penalty": 2.0})],
        ("gpt2", {}),
        ("llama", {}),
        ("llama", {"early_stopping": True, "length_penalty": 0.0}),
        ("llama", {"early_stopping": "never", "length_penalty": 1.5}),
        ("llama", {"early_stopping": "never", "length_penalty": -1.0}),
        ("gpt2", {"eos_token_id": 2, "num_beams": 5}),
        ("mistral", {}),
        ("bloom", {}),
        ("gemma2", {}),
    ),
)
def test_beams_equal_pytorch(family, settings):
    expected, found = both(lively(family), **({"num_beams": 3} | settings))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_beams_and_samples_read_the_cache_of_several_stacks():
    """A text that a beam leaves takes its keys and values along in every stack, and so does each sample."""
    mixed = lively("qwen3_moe", **MIXED)
    expected, found = both(mixed, num_beams=3)
    np.testing.assert_array_equal(found, expected)
    model, (ids, mask) = own(mixed), prompts()
    settings = {"max_new_tokens": NEW, "num_samples": 2}
    best = tokens(model, mixed.params, ids, mask, num_beams=3, **settings)
    assert best.shape == (3, 2, NEW)
    np.testing.assert_array_equal(best[:, 0], expected)
    drawn = tokens(
        model, mixed.params, ids, mask, do_sample=True, top_k=1, rng=jax.random.key(0), **settings
    )  # the likeliest alone, twice
    greedy = both(mixed)[0]
    np.testing.assert_array_equal(drawn, np.stack([greedy, greedy], axis=1))


RULES = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 5,
    "suppress_tokens": [PAD, 33],
    "begin_suppress_tokens": [30, 31],
    "forced_eos_token_id": 7,
    "bad_words_ids": [[40], [41, 42], [2]],
}


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_penalties_and_forced_and_forbidden_tokens_are_those_of_pytorch(beams):
    expected, found = both(lively("mistral"), num_beams=beams, **RULES)
    np.testing.assert_array_equal(found, expected)
    assert (expected != both(lively("mistral"), num_beams=beams)[0]).any()


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.slow) for rule in RULES])
def test_each_rule_is_that_of_pytorch(rule):
    expected, found = both(lively("llama"), **({"suppress_tokens": [PAD]} | {rule: RULES[rule]}))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_phi3_before_and_behind_the_change_of_its_positions():
    for prompt, new in ((8, 3), (11, 6)):
        models = lively("phi3", **SHORT_PHI3)
        ids = np.random.default_rng(0).integers(3, 60, (2, prompt)).astype(np.int32)
        with torch.no_grad():
            expected = models.torch_model.generate(
                torch.from_numpy(ids).long(), do_sample=False, max_new_tokens=new, eos_token_id=2
            )
        found = tokens(own(models), models.params, ids, np.ones_like(ids), max_new_tokens=new, eos_token_id=2)
        np.testing.assert_array_equal(found, expected.numpy()[:, prompt:])


FREE = {"max_new_tokens": NEW, "suppress_tokens": [PAD, *IDS["eos_token_id"]]}


@functools.cache
def free_tokens():
    """A model, its parameters, prompts, and what it says as long as nothing ends it."""
    models = lively("llama")
    model = own(models)
    return model, models.params, tokens(model, models.params, *prompts(), **FREE)


def test_the_side_of_the_padding_does_not_matter_and_no_text_gives_no_text():
    model, params, free = free_tokens()
    np.testing.assert_array_equal(tokens(model, params, *prompts("right"), **FREE), free)
    ids, mask = prompts()
    mask[1] = 0
    for beams in (1, 2):
        found = tokens(model, params, ids, mask, **FREE, num_beams=beams)
        np.testing.assert_array_equal(found[1], PAD)
        assert (found[[0, 2]] != PAD).all()


@pytest.mark.slow
def test_a_text_ends_with_any_end_and_the_loop_with_the_last_text():
    model, params, free = free_tokens()
    layers = []

    def counted(layer):
        jax.debug.callback(lambda: layers.append(None))
        return layer

    model = dataclasses.replace(model, module=model.module.clone(layer_params=counted))
    unpadded = dataclasses.replace(model, generation_config=GenerationConfig(eos_token_id=2))
    ends = [int(row[4]) for row in free]
    stops = [next(index for index, token in enumerate(row) if token in ends) for row in free]
    counts = []
    for speaker, end, pad in ((model, IDS["eos_token_id"], PAD), (model, ends, PAD), (unpadded, ends, ends[0])):
        found = tokens(speaker, params, *prompts(), **FREE, eos_token_id=end)
        jax.effects_barrier()
        counts.append(len(layers))
        for row, stop, text in zip(found, stops, free, strict=True) if end is ends else ():
            np.testing.assert_array_equal(row[: stop + 1], text[: stop + 1])
            np.testing.assert_array_equal(row[stop + 1 :], pad)
    once = counts[0] / NEW  # the prompt is read, and every token but the last
    assert counts[1] - counts[0] == once * (1 + max(stops)) < counts[0]


def test_compiled_once_for_equal_shapes():
    model, params, free = free_tokens()
    traced = []

    def counted(layer):
        traced.append(None)
        return layer

    model = dataclasses.replace(model, module=model.module.clone(layer_params=counted))
    ids, mask = prompts()
    np.testing.assert_array_equal(model.generate(params, ids, mask, **FREE), free)
    before = len(traced)
    np.testing.assert_array_equal(model.generate(params, ids[::-1], mask[::-1], **FREE), free[::-1])
    assert before > 0
    assert len(traced) == before
    jax.eval_shape(lambda params: model.generate(params, ids[:2], mask[:2], **FREE), params)
    assert len(traced) > before


@pytest.mark.slow
def test_half_precision_reads_the_prompt_as_a_call_does():
    models = lively("gemma3_text")
    model = own(models, dtype="bfloat16")
    ids, mask = prompts()
    logits = jax.jit(lambda params: model(params, ids, mask), compiler_options=QUICK)(models.params)
    found = tokens(model, models.params, ids, mask, max_new_tokens=1)
    np.testing.assert_array_equal(found[:1, 0], np.asarray(logits, np.float32)[:1, -1].argmax(-1))


@pytest.mark.parametrize("settings", [{}, pytest.param({"num_beams": 3}, marks=pytest.mark.slow)])
def test_split_over_devices_it_says_the_same(settings):
    """Parameters over fsdp and tensor, prompts over data and fsdp."""
    models = lively("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=32)
    model = own(models)
    ids, mask = (np.concatenate([array, array[:1]]) for array in prompts())
    alone = tokens(model, models.params, ids, mask, max_new_tokens=NEW, **settings)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def place(path, leaf):
        axes = ("tensor", "fsdp") if path[-2:-1] and path[-2].key in ("o", "down") else ("fsdp", "tensor")
        spec = PartitionSpec(*(None,) * (leaf.ndim - 2), *axes) if leaf.ndim > 1 else PartitionSpec()
        spec = PartitionSpec() if path[-1].key == "scale" else spec
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    split = jax.tree_util.tree_map_with_path(place, models.params)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    found = tokens(model, split, *jax.device_put((ids, mask), rows), max_new_tokens=NEW, **settings)
    np.testing.assert_array_equal(found, alone)


def letters():
    """A tokenizer whose 64 tokens are letters and pairs of letters."""
    words = [*"abcdefgh", *(one + two for one in "abcdefgh" for two in "abcdefg")]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("settings", first([{}], ({"num_beams": 4, "num_samples": 3},), ({"num_beams": 3},)))
def test_stop_strings_log_probs_and_samples_are_those_of_pytorch(settings):
    """The stop string begins in one token of what the first prompt would be continued with, and ends in another."""
    model, params, free = free_tokens()
    tokenizer = letters()
    stop = tokenizer.decode(free[0, 2:8])[1:4]
    named = FREE | settings | {"stop_strings": [stop]}
    samples = settings.get("num_samples", 1)
    others = {name: value for name, value in named.items() if name != "num_samples"}
    config = GenerationConfig(**(IDS | others), num_return_sequences=samples, do_sample=False)
    ids, mask = map(torch.from_numpy, prompts())
    with torch.no_grad():
        expected = lively("llama").torch_model.generate(
            ids.long(),
            attention_mask=mask.long(),
            generation_config=config,
            tokenizer=tokenizer,
            return_dict_in_generate=True,
            output_logits=True,
        )
        indices = expected.get("beam_indices")
        scores = lively("llama").torch_model.compute_transition_scores(
            expected.sequences, expected.logits, indices, normalize_logits=True
        )
    found = model.generate(params, *prompts(), **named, log_probs=True, tokenizer=tokenizer)
    said, log_probs = (np.asarray(found[name]).reshape(3 * samples, NEW) for name in ("ids", "log_probs"))
    lengths = np.asarray(found["lengths"]).reshape(-1)
    assert min(lengths) < NEW
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(said[row, :length], expected.sequences[row, 8 : 8 + length])
        np.testing.assert_array_equal(said[row, length:], PAD)
        np.testing.assert_allclose(log_probs[row, :length], scores[row, :length], atol=1e-4)
        np.testing.assert_array_equal(log_probs[row, length:], 0)
        ends = stop in tokenizer.decode(said[row, :length]) and stop not in tokenizer.decode(said[row, : length - 1])
        assert ends or length == NEW


@pytest.mark.slow
def test_samples_are_drawn_apart():
    model, params, _ = free_tokens()
    named = FREE | {"do_sample": True, "num_samples": 4, "temperature": 3.0, "rng": jax.random.key(0)}
    found = tokens(model, params, *prompts(), **named)
    assert found.shape == (3, 4, NEW)
    assert len({tuple(row) for row in found[0]}) == 4


DRAWN = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


@pytest.mark.parametrize("settings", first([DRAWN], ({"top_k": 0},)))
def test_first_tokens_are_drawn_from_what_the_settings_leave(settings):
    """A chi-square test of 4000 keys against PyTorch's filters of PyTorch's logits."""
    models = pair("llama")
    model = own(models)
    ids = prompts()[0][:1]
    warpers = LogitsProcessorList()
    if settings is DRAWN:
        warpers.extend([TemperatureLogitsWarper(1.3), TopKLogitsWarper(20), TopPLogitsWarper(0.9)])
        warpers.append(MinPLogitsWarper(0.02))
    with torch.no_grad():
        logits = models.torch_model(torch.from_numpy(ids).long()).logits[:, -1]
        shares = torch.softmax(warpers(None, logits), -1).numpy()[0].astype(np.float64)
    draw = jax.vmap(
        lambda key: model.generate(models.params, ids, rng=key, do_sample=True, max_new_tokens=1, **settings)[0, 0]
    )
    found = np.asarray(jax.jit(draw, compiler_options=QUICK)(jax.random.split(jax.random.key(5), 4000)))
    counts = np.bincount(found, minlength=64)
    assert counts[shares == 0].sum() == 0
    often = shares * 4000 >= 5
    assert often.sum() > 5
    observed, expected = np.append(counts[often], counts[~often].sum()), np.append(shares[often], shares[~often].sum())
    kept = expected > 0
    assert chisquare(observed[kept], 4000 * expected[kept] / expected[kept].sum()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("name", "warper"),
    [
        ("top_k", TopKLogitsWarper(7)),
        ("top_p", TopPLogitsWarper(0.8)),
        ("min_p", MinPLogitsWarper(0.1)),
        ("temperature", TemperatureLogitsWarper(0.3)),
    ],
)
def test_each_filter_leaves_what_pytorch_leaves(name, warper):
    scores = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32) * 2
    value = {"top_k": 7, "top_p": 0.8, "min_p": 0.1, "temperature": 0.3}[name]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    unused = {field.name: None for field in dataclasses.fields(GenerationSettings)}
    found = filtered_scores(jnp.asarray(scores), GenerationSettings(**(unused | neutral | {name: value})))
    np.testing.assert_allclose(found, warper(None, torch.from_numpy(scores)).numpy(), rtol=1e-6)


def test_sampling_follows_its_key_and_the_likeliest_alone_is_greedy():
    model, params, free = free_tokens()
    named = FREE | {"do_sample": True}
    likeliest = tokens(model, params, *prompts(), rng=jax.random.key(0), top_k=1, **named)
    np.testing.assert_array_equal(likeliest, free)
    sample = jax.jit(
        lambda key: model.generate(params, *prompts(), rng=key, temperature=3.0, **named), compiler_options=QUICK
    )
    one, again, other = (np.asarray(sample(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert (one[:, 0] != one[:, 1]).any()


def refusal(family="llama", changed=None, ids=None, mask=None, **settings):
    config = hf_config(family, **(changed or {}))
    named = {"config": config, "dtype": "float32", "generation_config": None, "where": "recipe.yaml:3: model.config"}
    model = build_decoder(decoder_config(config, where=where), **named)
    ids = np.ones((2, 8), np.int32) if ids is None else ids
    with pytest.raises(ModelError) as caught:
        model.generate(model.abstract, ids, mask, **settings)
    text = str(caught.value)
    assert text.startswith("recipe.yaml:3: model.config: ")
    return text.removeprefix("recipe.yaml:3: model.config: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"do_sample": True, "num_beams": 2},
            "sampling and beam search exclude each other here\n  -> set num_beams: 1",
        ),
        (
            {"num_samples": 3, "num_beams": 2, "eos_token_id": 2},
            "num_samples is 3, but there is one likeliest output, and 2 beams\n"
            "  -> set do_sample: true, or num_beams: 3",
        ),
        (
            {"stop_strings": [""], "eos_token_id": 2},
            "the generation setting stop_strings is ['']\n  -> it must be a list of texts that are not empty",
        ),
        ({"do_sample": True}, "sampling needs a key\n  -> pass rng= to ctx.model.generate, as predict_fn got it"),
        (
            {"family": "gpt2", "max_new_tokens": 57, "eos_token_id": 2},
            "input_ids has 65 tokens, but the model has positions for 64 (max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        ),
        (
            {"family": "phi3", "changed": SHORT_PHI3, "max_new_tokens": 4},
            "phi3 changes its rotary positions (longrope) at 10 tokens, between a prompt of 8 and an output of 4\n"
            "  -> make outputs shorter: predict.generation.max_new_tokens: 3",
        ),
        (
            {"changed": {"eos_token_id": None}},
            "the generation config has no eos_token_id\n  -> add it to the model's config",
        ),
        (
            {"changed": {"typical_p": 0.9}},
            "the generation setting typical_p: 0.9 is not honoured here\n  -> remove it from generation_config.json",
        ),
        (
            {"encoder_repetition_penalty": 1.5, "num_beams": 2, "eos_token_id": 2},
            "encoder_repetition_penalty and beam search exclude each other: PyTorch applies it to some beams only\n"
            "  -> set num_beams: 1, or leave encoder_repetition_penalty out",
        ),
        (
            {"temperature": 0.0},
            "the generation setting temperature is 0.0\n  -> it must be a number above 0",
        ),
        (
            {"top_k": 2.5},
            "the generation setting top_k is 2.5\n  -> it must be an integer of 0 or more",
        ),
        (
            {"early_stopping": "always"},
            "the generation setting early_stopping is 'always'\n  -> it must be true, false or never",
        ),
        ({"ids": np.ones(8, np.int32)}, "prompts have shape [8]\n  -> give input_ids of shape [B, P]"),
        (
            {"mask": np.ones((2, 7), np.int32)},
            "attention_mask has shape [2, 7], but input_ids [2, 8]\n  -> give them the same shape",
        ),
    ],
)
def test_refuses_what_cannot_be_generated(settings, message):
    assert refusal(**settings) == message


def test_refuses_unknown_settings():
    text = refusal(top_q=0.5)
    assert text.startswith(
        "generation knows no setting top_q\n  -> settings: bad_words_ids, begin_suppress_tokens, bos_token_id, "
    )
    assert text.endswith(", suppress_tokens, temperature, top_k, top_p")
