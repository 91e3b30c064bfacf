"""Generated tokens of the Flax classes: redco's against PyTorch's, and what is refused."""

import functools
import json

import jax
import numpy as np
import pytest
import torch

from redco_cli.errors import ModelError
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import config_for, inputs_for, save_torch, where

NEW = 8
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50, "<|de|>": 51, "<|fr|>": 52},
    "task_to_id": {"translate": 53, "transcribe": 54},
    "no_timestamps_token_id": 63,
}
MODELS = {
    **{kind: (kind, "seq2seq", {}) for kind in ("t5", "mt5", "longt5", "bart", "mbart", "pegasus", "marian")},
    **{kind: (kind, "seq2seq", {}) for kind in ("blenderbot", "encoder-decoder")},
    "vision-encoder-decoder": ("vision-encoder-decoder", "vision_to_sequence", {}),
    "speech-encoder-decoder": ("speech-encoder-decoder", "speech_to_sequence", {}),
    "whisper": ("whisper", "speech_to_sequence", {}),
    "of bert": (
        "encoder-decoder",
        "seq2seq",
        {"decoder": config_for("bert", "causal_lm", add_cross_attention=True)},
    ),
    **{kind: (kind, "causal_lm", IDS) for kind in ("gpt2", "gpt_neo", "gptj", "bloom")},
    "xglm": ("xglm", "causal_lm", IDS | {"pad_token_id": 1, "bos_token_id": 0}),  # the only padding its class knows
}
"""Name of a case to model type, task, and what differs from the tiny config."""

BEAMS = {"num_beams": 3, "eos_token_id": [2, 7, 11, 23]}
SETTINGS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "many ends": BEAMS,
    "long": BEAMS | {"early_stopping": True, "length_penalty": 2.0},
    "short": BEAMS | {"length_penalty": 0.0},
    "never": BEAMS | {"early_stopping": "never", "length_penalty": 1.5},
    "rules": {"num_beams": 2, "no_repeat_ngram_size": 2, "min_length": 6, "forced_eos_token_id": 2},
    "first": {"forced_bos_token_id": 9, "begin_suppress_tokens": [9, 30], "suppress_tokens": [31]},
    "penalties": {"num_beams": 2, "repetition_penalty": 1.7, "bad_words_ids": [[2], [40, 41]], "min_new_tokens": 3},
    "normal": {"num_beams": 3, "suppress_tokens": list(range(20, 40)), "renormalize_logits": True},
}
TEXTS = {
    "source": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5},
    "source in beams": {"num_beams": 2, "encoder_no_repeat_ngram_size": 2},
}
FAST = [("gpt2", "greedy")]
ALL = [(model, name) for model in ("t5", "bart") for name in SETTINGS | TEXTS] + [
    (model, name) for model in MODELS for name in ("greedy", "many ends", "rules") if model not in ("t5", "bart")
]


def tiny(**changed):
    """A causal model from scratch."""
    config = config_for("llama", "causal_lm", **(IDS | changed))
    return resolve_model(ModelSection(config=config, implementation="hf_flax"), where=where)


def prompts(task, model_type):
    """The main input and its mask; causal prompts are padded on the left."""
    inputs = inputs_for(model_type, task)
    mask = inputs.get("attention_mask")
    main = next(iter(inputs.values()))
    if task == "causal_lm":
        mask = mask[:, ::-1].copy()
        main = np.where(mask == 1, main, 0)
    if model_type == "speech-encoder-decoder":
        mask = np.ones(main.shape, np.int32)
        mask[1, 150:] = 0
    return main, mask


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Name of a case to the model in both libraries, and its parameters; made once for all settings."""

    def pair(name):
        model_type, task, changed = MODELS[name]
        saved = save_torch(config_for(model_type, task, **changed), task, tmp_path_factory.mktemp("saved"))
        if model_type == "whisper":  # what the published checkpoints say
            file = saved.directory / "generation_config.json"
            config = json.loads(file.read_text()) | WHISPER
            config.pop("_from_model_config", None)  # with it, what only Whisper knows is not read
            file.write_text(json.dumps(config))
            for key, value in WHISPER.items():
                setattr(saved.torch_model.generation_config, key, value)
        model = resolve_model(saved.section, where=where)
        return saved.torch_model, model, load_params(model, saved.directory).params

    return functools.cache(pair)


def both(pairs, name, **settings):
    """What PyTorch and redco say, each row up to its end."""
    model_type, task, _ = MODELS[name]
    torch_model, model, params = pairs(name)
    settings = {"max_new_tokens": NEW, "do_sample": False} | settings
    main, mask = prompts(task, model_type)
    tensor = torch.from_numpy(main)
    masks = {} if mask is None else {"attention_mask": torch.from_numpy(mask).long()}
    ids = tensor.long() if main.dtype == np.int32 else tensor
    with torch.no_grad():
        expected = torch_model.generate(ids, **masks, **settings).numpy()
    if model_type != "whisper":  # which leaves out what its decoder starts with
        expected = expected[:, main.shape[1] if task == "causal_lm" else 1 :]
    found = np.asarray(model.generate(params, main, mask, **settings))
    assert found.shape == (2, NEW)
    ends = settings.get("eos_token_id", model.generation_config.eos_token_id)
    pad = model.generation_config.pad_token_id
    return [
        [said(row, ends if isinstance(ends, list) else [ends], pad, model_type == "whisper") for row in rows]
        for rows in (expected, found)
    ]


def said(row, ends, pad, without_end):
    """The tokens of an output up to its end; Whisper's PyTorch class leaves the end out."""
    tokens = [int(token) for token in row]
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    if not without_end:
        return tokens[: stop + 1]
    return [token for token in tokens[:stop] if token != pad]


@pytest.mark.parametrize(("model", "settings"), FAST)
def test_tokens_equal_pytorch(model, settings, pairs):
    expected, found = both(pairs, model, **(SETTINGS | TEXTS)[settings])
    assert found == expected
    assert len({token for row in found for token in row}) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "settings"), [case for case in ALL if case not in FAST])
def test_every_setting_means_what_it_means_in_pytorch(model, settings, pairs):
    expected, found = both(pairs, model, **(SETTINGS | TEXTS)[settings])
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"language": "german"}, {"task": "translate"}, {"language": "<|fr|>", "task": "translate"}]
)
def test_whisper_starts_as_in_pytorch(settings, pairs):
    """Its language is detected where it is not given."""
    expected, found = both(pairs, "whisper", **settings)
    assert found == expected


@pytest.mark.slow  # the decoder's search, which its own tests prove
def test_every_end_token_ends_a_text_that_is_padded_from_there():
    model = tiny(num_hidden_layers=1)
    params = jax.jit(model.init)(jax.random.key(0))
    main, mask = prompts("causal_lm", "llama")
    free = np.asarray(jax.jit(lambda p: model.generate(p, main, mask, max_new_tokens=NEW))(params))
    ends = [next(token for token in range(4, 60) if token not in free), int(free[0, 2])]
    cut = np.asarray(jax.jit(lambda p: model.generate(p, main, mask, max_new_tokens=NEW, eos_token_id=ends))(params))
    first = int(np.argmax(free[0] == ends[1]))
    expected = np.array([*free[0, : first + 1], *[0] * (NEW - first - 1)])
    np.testing.assert_array_equal(cut[0], expected)


@pytest.mark.slow  # the decoder's search, which its own tests prove
def test_sampling_follows_its_key_and_its_settings():
    model = tiny(num_hidden_layers=1)
    params = jax.jit(model.init)(jax.random.key(0))
    main, mask = prompts("causal_lm", "llama")

    @jax.jit
    def sample(params, key):
        return model.generate(params, main, mask, rng=key, max_new_tokens=NEW, do_sample=True, top_p=0.9)

    @jax.jit
    def likeliest(params, key):
        return model.generate(params, main, mask, rng=key, max_new_tokens=NEW, do_sample=True, top_k=1)

    one, again, other = (np.asarray(sample(params, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    greedy = jax.jit(lambda p: model.generate(p, main, mask, max_new_tokens=NEW))(params)
    np.testing.assert_array_equal(likeliest(params, jax.random.key(3)), greedy)


@pytest.mark.slow
def test_generates_the_same_from_replicated_parameters():
    model = tiny(num_hidden_layers=1)
    params = jax.jit(model.init)(jax.random.key(0))
    main, mask = prompts("causal_lm", "llama")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    generate = jax.jit(lambda p: model.generate(p, main, mask, max_new_tokens=NEW))
    np.testing.assert_array_equal(generate(jax.device_put(params, everywhere)), generate(params))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"do_sample": True, "num_beams": 2, "rng": 1},
            "sampling and beam search exclude each other here\n  -> set num_beams: 1",
        ),
        (
            {"do_sample": True, "max_new_tokens": 4},
            "sampling needs a key\n  -> pass rng= to ctx.model.generate, as predict_fn got it",
        ),
        (
            {"max_new_tokens": 40},
            "input_ids has 48 tokens, but the model has positions for 40 (max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        ),
    ],
)
def test_refuses_what_cannot_be_generated(settings, message):
    model = tiny()
    rng = jax.random.key(settings.pop("rng")) if "rng" in settings else None
    with pytest.raises(ModelError) as caught:
        jax.eval_shape(lambda p: model.generate(p, np.ones((2, 8), int), rng=rng, **settings), model.abstract)
    assert str(caught.value) == f"recipe.yaml:3: model.config: {message}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eos_token_id": None}, "the generation config has no eos_token_id\n  -> add it to the model's config"),
        (
            {"typical_p": 0.9},
            "the generation setting typical_p: 0.9 is not honoured here\n  -> remove it from generation_config.json",
        ),
    ],
)
def test_refuses_configs_it_cannot_follow(changed, message):
    model = tiny(**changed)
    with pytest.raises(ModelError) as caught:
        jax.eval_shape(lambda p: model.generate(p, np.ones((2, 8), int)), model.abstract)
    assert str(caught.value) == f"recipe.yaml:3: model.config: {message}"


def test_classifiers_do_not_generate():
    section = ModelSection(config=config_for("bert", "sequence_classification"), task="sequence_classification")
    model = resolve_model(section, where=where)
    with pytest.raises(ModelError) as caught:
        model.generate(model.abstract, np.ones((2, 8), int))
    assert str(caught.value) == (
        "recipe.yaml:3: model.config: a model for sequence_classification does not generate\n"
        "  -> choose model.task causal_lm, seq2seq, vision_to_sequence or speech_to_sequence"
    )
