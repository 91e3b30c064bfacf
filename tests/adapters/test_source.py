"""Adapters that are there already: `adapter.from` takes what their files say, and refuses what contradicts it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redco_cli.adapters.model import adapter_of
from redco_cli.adapters.peft import read_peft
from redco_cli.adapters.source import check_source, filled
from redco_cli.errors import ModelError, RecipeError, RedcoError
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.schema import ModelSection

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **SIZES}
MODEL = resolve_model(ModelSection(config=CONFIG), where=str)
SAID = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj"]}
SAID |= {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 5}}
Q, V = "layers/attention/q/kernel", "layers/attention/v/kernel"


def tensors(**shapes):
    generator, found = np.random.default_rng(0), {}
    for layer in range(2):
        for name, (rank, out) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            found[f"{at}.lora_A.weight"] = generator.normal(size=(rank, 16)).astype(np.float32)
            found[f"{at}.lora_B.weight"] = generator.normal(size=(out, rank)).astype(np.float32)
    return found


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """A directory as PEFT writes it, beside the recipe."""
    monkeypatch.chdir(tmp_path)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps(SAID))
    save_file(tensors(q_proj=(2, 16), v_proj=(4, 8)), "adapter/adapter_model.safetensors")
    return tmp_path / "adapter"


def loaded(text="from: adapter"):
    Path("recipe.yaml").write_text(f"plugin: {{module: causal_lm}}\noutput_dir: run\nadapter: {{{text}}}\n")
    return load_recipe("recipe.yaml", environ={})


def taken(text="from: adapter"):
    recipe = loaded(text)
    return filled(recipe.recipe.adapter, MODEL, recipe)


@pytest.mark.usefixtures("adapter")
def test_what_its_files_say_need_not_be_said():
    section = taken("from: adapter, dropout: 0.1")
    assert (section.type, section.rslora, section.dropout, section.source) == ("lora", True, 0.1, "adapter")
    assert section.targets == (Q, V)
    how = adapter_of(MODEL, section, str).adapters
    assert {path: (one.rank, round(one.scale, 6)) for path, one in how.items()} == {
        Q: (2, round(6 / 2**0.5, 6)),
        V: (4, 2.5),
    }
    said = taken("from: adapter, targets: ['.*/(q|v)/kernel'], rank_pattern: {'.*/v/kernel': 4}, rank: 2, dropout: 0.1")
    assert said == section
    recipe = loaded("from: gone")
    assert (
        filled(section.model_copy(update={"from": "gone"}), MODEL, recipe).source == "gone"
    )  # nothing is left to read
    with pytest.raises(RedcoError, match=r"adapter.from: gone is no directory\n.*redco train OUTPUT_DIR"):
        check_source(section.model_copy(update={"from": "gone"}), MODEL, recipe)


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("rank: 8", "recipe.yaml:3: adapter.rank: 8 given, but adapter/adapter_config.json: r says"),
        ("targets: ['.*/q/kernel']", "adapter.targets: ('.*/q/kernel',) given, but"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("alpha: 7.0", "adapter.alpha: 7.0 given, but adapter/adapter_config.json: lora_alpha says"),
                ("type: dora", "adapter.type: 'dora' given, but adapter/adapter_config.json: use_dora says 'lora'"),
                ("rslora: false", "adapter.rslora: False given, but adapter/adapter_config.json: use_rslora says True"),
                ("targets: all_linear", "adapter.targets: 'all_linear' given, but"),
                ("modules_to_save: [embedding]", "adapter.modules_to_save: ('embedding',) given, but"),
            )
        ),
    ],
)
def test_what_is_said_otherwise_is_refused(given, problem):
    with pytest.raises(RecipeError, match=re.escape(problem)) as refused:
        taken(f"from: adapter, {given}")
    assert "-> leave " in str(refused.value)


def changed(**settings):
    return lambda path: path.joinpath("adapter_config.json").write_text(json.dumps({**SAID, **settings}))


def rewritten(change):
    def rewrite(path):
        file = path / "adapter_model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file)

    return rewrite


def first(found, end):
    return next(name for name in found if name.endswith(end))


def cut(path):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


MALFORMED = {
    "no json": (lambda path: (path / "adapter_config.json").write_text("{"), "holds no adapter that can be read"),
    "no mapping": (lambda path: (path / "adapter_config.json").write_text("[]"), "peft_type None is not read"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "holds no adapter that can be read"),
    "cut off": (cut, "holds no adapter that can be read"),
    "another kind": (changed(peft_type="IA3"), "peft_type IA3 is not read"),
    "a rank of text": (changed(r="two", rank_pattern={}), "r is 'two', which is no positive number"),
    "no alpha": (changed(lora_alpha=None), "lora_alpha is None, which is no positive"),
    "a pattern": (changed(alpha_pattern={"(": 3}), "alpha_pattern has '(', which is no regular expression"),
    "A alone": (rewritten(lambda found: found.pop(first(found, "lora_B.weight"))), "lora_A or lora_B alone"),
    "other dims": (
        rewritten(lambda found: found.update({first(found, "lora_A.weight"): np.zeros((2, 5), np.float32)})),
        "do not fit 16 to 16",
    ),
    "no matrix": (
        rewritten(lambda found: found.update({first(found, "lora_A.weight"): np.zeros(3, np.float32)})),
        "is no matrix",
    ),
    "not finite": (
        rewritten(lambda found: found[first(found, "lora_A.weight")].fill(np.nan)),
        "is not finite",
    ),
    "of another model": (
        rewritten(
            lambda found: found.update(
                {f"base_model.model.h.0.lora_{x}.weight": np.zeros((4, 4), np.float32) for x in "AB"}
            )
        ),
        "it holds h.0, which this model has not",
    ),
    "nothing": (rewritten(lambda found: found.clear()), "it adapts no weight"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_directory_is_refused_with_its_place(name, adapter):
    damage, problem = MALFORMED[name]
    damage(adapter)
    with pytest.raises(ModelError, match=re.escape(problem)) as refused:
        taken()
    text = str(refused.value)
    assert text.startswith(("adapter: ", "adapter/"))
    assert "\n  -> " in text


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "source has neither adapter_config.json nor a checkpoint of a run"),
        ({"checkpoint-3/meta/metadata": "{"}, "source has neither"),
        ({"checkpoint-3/meta/metadata": '{"recipe": {}}'}, "source/checkpoint-3 is of a run that trained no adapter"),
        (
            {"checkpoint-3/meta/metadata": '{"recipe": {"adapter": {"rank": "x"}}}'},
            "source/checkpoint-3 says of its adapter what this version does not read",
        ),
    ],
)
def test_a_run_that_has_no_adapter_to_take_is_refused(files, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("source").mkdir()
    for name, text in files.items():
        Path("source", name).parent.mkdir(parents=True)
        Path("source", name).write_text(text)
    with pytest.raises(RedcoError, match=re.escape(f"recipe.yaml:3: adapter.from: {problem}")):
        taken("from: source")


def test_the_newest_checkpoint_of_a_run_says_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step, rank in ((3, 4), (12, 8)):
        said = {"recipe": {"adapter": {"rank": rank, "targets": [".*/q/kernel"], "dropout": 0.5, "from": "x"}}}
        Path(f"source/checkpoint-{step}/meta").mkdir(parents=True)
        Path(f"source/checkpoint-{step}/meta/metadata").write_text(json.dumps(said))
    section = taken("from: source")
    assert (section.rank, section.targets, section.dropout, section.source) == (8, (".*/q/kernel",), 0.0, "source")
    assert taken("from: source/checkpoint-3").rank == 4
    with pytest.raises(RecipeError, match=r"adapter.rank: 2 given, but source/checkpoint-12: adapter.rank says 8"):
        taken("from: source, rank: 2")


def test_values_keep_their_layers(adapter):
    _, own = read_peft(adapter, MODEL)
    found = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(own["layers"]["attention"]["q"]["kernel"]["A"][1], found[name].T)
