"""Generated tokens: redco's against PyTorch's, and what is refused."""

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
    return main, mask


def both(config, task, directory, **settings):
    """Tokens by PyTorch and by redco, without the prompt."""
    saved = save_torch(config, task, directory)
    main, mask = prompts(task, config["model_type"])
    tensor = torch.from_numpy(main)
    masks = {} if mask is None else {"attention_mask": torch.from_numpy(mask).long()}
    with torch.no_grad():
        tokens = saved.torch_model.generate(
            tensor.long() if main.dtype == np.int32 else tensor,
            **masks,
            max_new_tokens=NEW,
            do_sample=False,
            **settings,
        ).numpy()
    tokens = tokens[:, main.shape[1] if task == "causal_lm" else 1 :]
    model = resolve_model(saved.section, where=where)
    params = load_params(model, saved.directory).params

    @jax.jit
    def generate(params, main, mask):
        return model.generate(params, main, mask, max_new_tokens=NEW, **settings)

    found = np.asarray(generate(params, main, mask))
    assert found.shape == (2, NEW)
    pad = model.generation_config.pad_token_id
    return np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=pad), found


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(("model_type", "task"), [("gpt2", "causal_lm"), ("t5", "seq2seq")])
def test_tokens_equal_pytorch(model_type, task, settings, tmp_path):
    ids = IDS if task == "causal_lm" else {}
    expected, found = both(config_for(model_type, task, **ids), task, tmp_path, **settings)
    assert len(np.unique(expected)) > 2
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    ("model_type", "task", "changed"),
    [
        ("bart", "seq2seq", {}),
        ("encoder-decoder", "seq2seq", {}),
        ("encoder-decoder", "seq2seq", {"decoder": config_for("bert", "causal_lm", add_cross_attention=True)}),
        ("vision-encoder-decoder", "vision_to_sequence", {}),
        ("speech-encoder-decoder", "speech_to_sequence", {}),
        ("marian", "seq2seq", {}),
        ("gptj", "causal_lm", IDS),
        ("bloom", "causal_lm", IDS),
    ],
)
def test_tokens_equal_pytorch_in_other_families(model_type, task, changed, settings, tmp_path):
    expected, found = both(config_for(model_type, task, **changed), task, tmp_path, **settings)
    np.testing.assert_array_equal(found, expected)


def test_every_end_token_ends_a_text_that_is_padded_from_there():
    model = tiny(num_hidden_layers=1)
    params = jax.jit(model.init)(jax.random.key(0))
    main, mask = prompts("causal_lm", "llama")
    free = np.asarray(jax.jit(lambda p: model.generate(p, main, mask, max_new_tokens=NEW))(params))
    ends = [next(token for token in range(4, 60) if token not in free), int(free[0, 2])]
    cut = np.asarray(jax.jit(lambda p: model.generate(p, main, mask, max_new_tokens=NEW, eos_token_id=ends))(params))
    first = int(np.argmax(free[0] == ends[1]))
    expected = np.array([*free[0, :first], ends[0], *[0] * (NEW - first - 1)])
    np.testing.assert_array_equal(cut[0], expected)


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
            {"repetition_penalty": 1.5},
            "the generation setting repetition_penalty: 1.5 is not honoured by the Flax classes\n"
            "  -> remove it from generation_config.json",
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
