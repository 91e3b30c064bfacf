"""What is planned: models alone, recipes with their plugin's loss, and what is refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_cli.errors import RedcoError, UsageError
from redco_cli.models.resolve import resolve_model
from redco_cli.planning.devices import Devices
from redco_cli.planning.search.ways import options
from redco_cli.planning.workload import find_workload, recipe_workload
from redco_cli.plugin.state import Variables
from redco_cli.recipe.schema import ModelSection
from redco_cli.recipe.shipped import shipped_recipes
from tests.models.flax.tiny import CONFIGS
from tests.projects import LLAMA

PLUGIN = """
import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from redco_cli.plugin.contract import Loss


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="down")(nn.relu(nn.Dense(128, name="up")(x)))


def build_model(ctx):
    return Net()


def load_examples(ctx, split):
    return [{"x": [float(i)] * 32} for i in range(16)] if split == "train" else None


def collate_fn(ctx, examples):
    return {"x": np.array([e["x"] for e in examples], np.float32)}


def loss_fn(ctx, params, batch, rng, train):
    out = ctx.model(params, batch["x"])
    return Loss((out**2).sum(), jnp.float32(out.shape[0]))


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"])
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(
        "plugin: {module: plugin.py}\ntrain: {global_batch_size: 8, steps: 2}\noutput_dir: run\n"
    )
    monkeypatch.chdir(tmp_path)
    return "recipe.yaml"


def test_a_recipe_is_its_plugins_loss(recipe: str) -> None:
    workload = recipe_workload(recipe)
    assert workload.name == "recipe"
    assert {name: leaf.shape for name, leaf in workload.batch(4).items()} == {"x": (4, 32)}
    assert (workload.global_batch_size, workload.micro_batch_size, workload.seq_length) == (8, None, None)
    assert (workload.mesh, workload.remat, workload.frozen) == (None, "none", frozenset())
    loss = workload.loss(
        jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape), workload.abstract), {"x": jax.numpy.ones((4, 32))}, None
    )
    hidden = 32 + 1
    assert float(loss.sum) == pytest.approx(4 * 32 * (128 * hidden + 1) ** 2, rel=1e-6)


def test_what_a_recipe_decides(recipe: str) -> None:
    decided = ["mesh={data: 1, fsdp: 4, tensor: 2}", "train.micro_batch_size=4", "train.remat=none"]
    override = "sharding.override=[{path: up/kernel, axes: [null, tensor+fsdp]}]"
    workload = recipe_workload(recipe, [*decided, override])
    assert workload.mesh == {"data": 1, "fsdp": 4, "tensor": 2}
    assert (workload.micro_batch_size, workload.recomputing) == (4, None)
    assert workload.override == (("up/kernel", [None, ["tensor", "fsdp"]]),)
    ways, _ = options(workload, Devices(8, 1, None))
    assert len(ways) == 1
    (kernel,) = (row for row in ways[0].plan.rows if row.path.endswith("up/kernel"))
    assert kernel.reason == "override up/kernel"
    assert kernel.bytes_per_device == kernel.bytes // 8


def test_frozen_parameters_have_neither_gradient_nor_optimizer_state(recipe: str) -> None:
    """up: 32 x 128 + 128 numbers; down: 128 x 32 + 32. Adam keeps two moments, and a count."""
    up, down = 4 * (32 * 128 + 128), 4 * (128 * 32 + 32)
    whole = options(recipe_workload(recipe), Devices(1, 1, None))[0][0].memory
    assert (whole.parameters, whole.gradients) == (up + down, up + down)
    assert 2 * (up + down) <= whole.optimizer <= 2 * (up + down) + 16
    frozen = options(recipe_workload(recipe, ["train.freeze=['up/.*']"]), Devices(1, 1, None))[0][0].memory
    assert (frozen.parameters, frozen.gradients) == (up + down, down)
    assert 2 * down <= frozen.optimizer <= 2 * down + 16
    split = options(recipe_workload(recipe, ["train.freeze=['up/.*']", "mesh={fsdp: 8}"]), Devices(8, 1, None))[0][
        0
    ].memory
    kernel, biases = 4 * 32 * 128 // 8, 4 * (128 + 32)  # a vector of the residual stream is whole everywhere
    assert (split.parameters, split.gradients) == (2 * kernel + biases, kernel + 4 * 32)


def test_batch_size_changes_the_recipe_and_seq_length_is_its_datas(recipe: str) -> None:
    assert find_workload(recipe, batch_size=32, seq_length=None).global_batch_size == 32
    with pytest.raises(RedcoError) as refused:
        find_workload(recipe, batch_size=None, seq_length=16)
    assert str(refused.value) == (
        "--seq-length: recipe.yaml is a recipe, whose data decide how long examples are\n"
        "  -> leave it out, and change data.max_length in the recipe"
    )


def test_a_model_alone_takes_its_own_length_and_64_examples(tmp_path: Path) -> None:
    preset = find_workload("gpt2", batch_size=None, seq_length=None)
    assert (preset.name, preset.global_batch_size, preset.seq_length) == ("gpt2", 64, 1024)
    assert sum(leaf.size for leaf in jax.tree.leaves(preset.abstract.params)) == 124_439_808
    by_hub = find_workload("openai-community/GPT2", batch_size=2, seq_length=8)
    assert (by_hub.name, by_hub.global_batch_size, by_hub.seq_length) == ("gpt2", 2, 8)
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 48, "vocab_size": 64}
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for target in (str(tmp_path), str(tmp_path / "config.json"), json.dumps(config)):
        workload = find_workload(target, batch_size=None, seq_length=None)
        assert workload.seq_length == 48
        assert {leaf.shape for leaf in workload.batch(3).values()} == {(3, 48)}


def test_a_length_that_a_model_was_not_made_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    find_workload(json.dumps(LLAMA), batch_size=2, seq_length=8)
    assert "positions" not in capsys.readouterr().err
    find_workload(json.dumps(LLAMA), batch_size=2, seq_length=5000)
    assert (
        f"llama has {LLAMA['max_position_embeddings']:,} positions, and --seq-length is 5,000"
        in capsys.readouterr().err
    )
    with pytest.raises(UsageError, match="--seq-length: the examples of vit-base are images"):
        find_workload("vit-base", batch_size=2, seq_length=8)


def test_an_inline_config_is_named_by_its_model_type() -> None:
    config = (
        "{model_type: gpt2, n_embd: 32, n_layer: 1,\n n_head: 2, n_positions: 48,\n"
        " vocab_size: 64, architectures: [GPT2LMHeadModel]}"
    )
    assert find_workload(config, batch_size=None, seq_length=None).name == "gpt2"


@pytest.mark.slow
def test_a_class_that_cannot_recompute_is_skipped() -> None:
    config = {
        "model_type": "bart",
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "architectures": ["BartForConditionalGeneration"],
    }
    workload = find_workload(json.dumps(config), batch_size=4, seq_length=16)
    ways, _ = options(workload, Devices(2, 1, 1000))
    assert {way.workload.remat for way in ways} == {"none"}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("gpt2-smal", "gpt2-smal: no recipe, no directory, no preset and no hub id\n  -> did you mean gpt2?"),
        (
            "nosuch",
            "nosuch: no recipe, no directory, no preset and no hub id\n"
            "  -> redco inspect-sharding --list shows what is built in",
        ),
        (
            "a" * 300,
            f"{'a' * 300}: no recipe, no directory, no preset and no hub id\n"
            "  -> redco inspect-sharding --list shows what is built in",
        ),
        ("{}", "{}: model.config: an inline config needs model_type\n  -> add it, such as model_type: llama"),
        (
            "{a: ",
            "MODEL:1: not valid YAML: while parsing a flow node expected the node content, but found '<stream end>'\n"
            "  -> check the indentation and quotes near that line",
        ),
        (
            "nothing.yaml",
            "nothing.yaml: no such recipe, neither a file nor shipped with redco\n"
            f"  -> known: {', '.join(shipped_recipes())}",
        ),
    ],
)
def test_what_is_nothing_is_refused(target: str, text: str) -> None:
    with pytest.raises(RedcoError) as refused:
        find_workload(target, batch_size=None, seq_length=None)
    assert str(refused.value) == text


def test_images_of_a_model_whose_config_names_no_size_are_those_of_imagenet() -> None:
    config = {"model_type": "resnet", **CONFIGS["resnet"], "architectures": ["ResNetForImageClassification"]}
    workload = find_workload(json.dumps(config), batch_size=2, seq_length=None)
    assert workload.batch(2)["pixel_values"].shape == (2, 3, 224, 224)
    assert workload.seq_length is None


@pytest.mark.slow
def test_a_clip_is_planned_with_the_loss_of_its_pairs_which_sees_the_whole_batch() -> None:
    """Each image is told from the others by its text, and each text by its image (arXiv 2103.00020, figure 3)."""
    config = {"model_type": "clip", **CONFIGS["clip"], "architectures": ["CLIPModel"]}
    workload = find_workload(json.dumps(config), batch_size=4, seq_length=None, dtype="float32")
    assert workload.whole_batch
    assert workload.micro_batch_size == 4
    positions = CONFIGS["clip"]["text_config"]["max_position_embeddings"]
    assert workload.batch(4)["input_ids"].shape == (4, positions)

    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(leaf.dtype), workload.abstract.params)
    batch = {
        "input_ids": rng.integers(0, 10, (4, positions)).astype(np.int32),
        "attention_mask": np.ones((4, positions), np.int32),
        "pixel_values": rng.normal(size=workload.batch(4)["pixel_values"].shape).astype(np.float32),
    }
    found = workload.loss(Variables(params, step=jnp.int32(0)), batch, jax.random.key(0))
    model = resolve_model(ModelSection(config=config, task="clip"), where=str)
    scores = model(params, **batch).logits_per_image
    both = jnp.concatenate([scores, scores.T])
    right = optax.softmax_cross_entropy_with_integer_labels(both, jnp.tile(jnp.arange(4), 2)).mean()
    np.testing.assert_allclose(found.sum / found.weight, right, rtol=1e-5)


@pytest.mark.slow
def test_a_model_of_raw_sound_is_planned_with_ten_seconds_of_it() -> None:
    config = {"model_type": "speech-encoder-decoder", **CONFIGS["speech-encoder-decoder"]}
    workload = find_workload(json.dumps(config), batch_size=2, seq_length=8, dtype="float32")
    batch = workload.batch(2)
    assert batch["inputs"].shape == (2, 160_000)
    found = jax.eval_shape(workload.loss, workload.abstract, batch, jax.random.key(0))
    assert found.sum.shape == ()
