import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from redco_cli.recipe.devices import MeshSection, OverrideSection
from redco_cli.recipe.explain import field_section
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.schema import GenerationSection, OtherModelSection, Recipe, TrainSection, json_schema
from redco_cli.recipe.section import Section
from redco_cli.recipe.sections.adapter import AdapterSection
from redco_cli.recipe.shipped import shipped_directory, shipped_recipes

BATCH = "train.global_batch_size: Examples per optimizer step, over all devices and micro-batches."
STEPS = "train.steps: Length of the run: optimizer steps or epochs."
MAX_TIME = (
    "train.max_time: Time on a clock (`8h`, `1h 30m`), from the start of training in this process, loading and "
    "compiling included; then the run saves and ends with exit code 75, as on SIGTERM: the same command continues. "
    "Default: none."
)
WARMUP = "train.warmup: Linear rise from 0 to the peak: steps, epochs or a share of the run."
RATE = "train.learning_rate: Peak learning rate."
FREEZE = (
    "train.freeze: Regular expressions over parameter paths (`.*embed.*`): "
    "matches get no gradient and no optimizer state."
)
FILES = (
    "data.train.data_files: Files or glob patterns; relative ones are searched from the recipe's folder, "
    "then the working directory."
)
MESH = "mesh: How devices are laid out; `auto` takes all, and splits parameters no more than their memory needs."
DATA = "mesh.data: Groups of devices that each hold all parameters and take their share of every batch."
LENGTH = "expected a number of optimizer steps (1000) or epochs (3 epochs)"
POSITIVE = "expected a positive number of optimizer steps (1000) or epochs (3 epochs)"
DURATION = "expected a number of optimizer steps (200), a share of the run (10%) or epochs (1 epoch)"
TOP = (
    "adapter, checkpoint, data, eval, logging, mesh, model, models, output_dir, planning, plugin, predict, "
    "privacy, seed, sharding, train"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  global_batch_size: '3'\n",
            f"r.yaml:4: train.global_batch_size: '3' given, but a whole number is expected\n  -> {BATCH}",
        ),
        (
            "train: {global_batch_size: true}\n",
            f"r.yaml:3: train.global_batch_size: True given, but a whole number is expected\n  -> {BATCH}",
        ),
        (
            "train: {global_batch_size: 1.5}\n",
            f"r.yaml:3: train.global_batch_size: 1.5 given, but a whole number is expected\n  -> {BATCH}",
        ),
        (
            "train: {global_batch_size: 0}\n",
            f"r.yaml:3: train.global_batch_size: 0 given, but a number > 0 is expected\n  -> {BATCH}",
        ),
        (
            "train: {learning_rate: fast}\n",
            f"r.yaml:3: train.learning_rate: 'fast' given, but a number is expected\n  -> {RATE}",
        ),
        (
            "train: {learning_rate: -1e-3}\n",
            f"r.yaml:3: train.learning_rate: -0.001 given, but a number >= 0.0 is expected\n  -> {RATE}",
        ),
        (
            "train: {learning_rate: .nan}\n",
            "r.yaml:3: train.learning_rate: .nan is not a finite number\n  -> give a finite one",
        ),
        (
            "train: {b1: 1}\n",
            "r.yaml:3: train.b1: 1 given, but a number < 1.0 is expected\n"
            "  -> train.b1: First-moment decay of adamw and lion; momentum of sgd and muon.",
        ),
        (
            "predict: {generation: {top_p: 1.5}}\n",
            "r.yaml:3: predict.generation.top_p: 1.5 given, but a number <= 1.0 is expected\n"
            "  -> predict.generation.top_p: Sample among the likeliest tokens that make up this probability.",
        ),
        (
            "seed: -1\n",
            "r.yaml:3: seed: -1 given, but a number >= 0 is expected\n"
            "  -> seed: Seed of initialisation, data order, dropout and sampling.",
        ),
        (
            "logging: {plot: 1}\n",
            "r.yaml:3: logging.plot: 1 given, but true or false is expected\n"
            "  -> logging.plot: Keep `loss.png` in the output directory up to date.",
        ),
        (
            "model: {dtype: float8}\n",
            "r.yaml:3: model.dtype: 'float8' given, but one of 'float32', 'bfloat16' or 'float16' is expected\n"
            "  -> model.dtype: Compute type. Parameters and optimizer state stay float32; `float16` trains with "
            "dynamic loss scaling.",
        ),
        ("train: {steps: soon}\n", f"r.yaml:3: train.steps: 'soon' given, but {LENGTH}\n  -> {STEPS}"),
        ("train: {steps: -5}\n", f"r.yaml:3: train.steps: -5 given, but {POSITIVE}\n  -> {STEPS}"),
        ("train: {steps: -1 epoch}\n", f"r.yaml:3: train.steps: '-1 epoch' given, but {POSITIVE}\n  -> {STEPS}"),
        (
            f"train: {{steps: {'x' * 500}}}\n",
            f"r.yaml:3: train.steps: '{'x' * 56}... given, but {LENGTH}\n  -> {STEPS}",
        ),
        ("train: {warmup: soon}\n", f"r.yaml:3: train.warmup: 'soon' given, but {DURATION}\n  -> {WARMUP}"),
        ("train: {warmup: -5}\n", f"r.yaml:3: train.warmup: -5 given, but it is negative: {DURATION}\n  -> {WARMUP}"),
        (
            "train: {micro_batch_size: some}\n",
            "r.yaml:3: train.micro_batch_size: 'some' given, but a whole number is expected "
            "or one of 'auto' is expected\n  -> train.micro_batch_size: "
            "Examples per forward and backward pass, over all devices; `auto` takes as many as fit.",
        ),
        (
            "train: fast\n",
            "r.yaml:3: train: 'fast' given, but a mapping (key: value) is expected\n  -> train: How to train.",
        ),
        ("train:\n", "r.yaml:3: train: None given, but a mapping (key: value) is expected\n  -> train: How to train."),
        ("train: {freeze: abc}\n", f"r.yaml:3: train.freeze: 'abc' given, but a list is expected\n  -> {FREEZE}"),
        (
            "train:\n  freeze:\n    - a\n    - 3\n",
            f"r.yaml:6: train.freeze.1: 3 given, but text is expected\n  -> {FREEZE}",
        ),
        (
            "data: {train: {path: json, data_files: 3}}\n",
            f"r.yaml:3: data.train.data_files: 3 given, but text is expected or a list is expected\n  -> {FILES}",
        ),
        (
            "data: {train: {path: json, data_files: [a, 3]}}\n",
            f"r.yaml:3: data.train.data_files.1: 3 given, but text is expected\n  -> {FILES}",
        ),
        (
            "data: {train: train.jsonl}\n",
            "r.yaml:3: data.train: 'train.jsonl' given, but a mapping (key: value) is expected or a list is expected\n"
            "  -> data.train: Training examples: one dataset, or a list of them, each with its `weight`.",
        ),
        (
            "mesh: foo\n",
            "r.yaml:3: mesh: 'foo' given, but a mapping (key: value) is expected or one of 'auto' is expected\n"
            f"  -> {MESH}",
        ),
        (
            "mesh: {data: 0}\n",
            f"r.yaml:3: mesh.data: 0 given, but a number > 0 is expected\n  -> {DATA}",
        ),
        ("mesh: {dat: 2}\n", "r.yaml:3: mesh.dat: unknown key\n  -> did you mean data?"),
        (
            "sharding: {override: [{path: kernel, axes: [data]}]}\n",
            "r.yaml:3: sharding.override.0.axes.0: 'data' given, "
            "but one of 'fsdp', 'tensor' or 'tensor+fsdp' is expected\n"
            "  -> sharding.override.0.axes: For each dim the mesh axis that splits it, both, or null; dims that are "
            "not listed stay whole.",
        ),
        (
            "sharding: {override: [{axes: [fsdp]}]}\n",
            "r.yaml:3: sharding.override.0.path: is missing\n"
            "  -> add it: sharding.override.0.path: Regular expression, searched for in the paths that "
            "`redco inspect-sharding` lists.",
        ),
        ("tarin: {}\n", "r.yaml:3: tarin: unknown key\n  -> did you mean train?"),
        ("optimizer: adam\n", "r.yaml:3: optimizer: unknown key\n  -> did you mean train.optimizer?"),
        (
            "batch_size: 2\n",
            "r.yaml:3: batch_size: unknown key\n  -> did you mean eval.batch_size or predict.batch_size?",
        ),
        (
            "eval: {predict.every: 5}\n",
            "r.yaml:3: eval.predict.every: unknown key: eval.predict is one value, and has no keys below it\n"
            "  -> eval.predict: Also run `predict_fn` and `metric_fn` on the eval examples.",
        ),
        ("zzz: 1\n", f"r.yaml:3: zzz: unknown key\n  -> known: {TOP}"),
        ("train:\n  learnin_rate: 1\n", "r.yaml:4: train.learnin_rate: unknown key\n  -> did you mean learning_rate?"),
        (
            "predict: {generation: {topk: 1}}\n",
            "r.yaml:3: predict.generation.topk: unknown key\n  -> did you mean top_k?",
        ),
        (
            "train.steps: 3\n",
            "r.yaml:3: train.steps: unknown key\n  -> write steps below train; dots are for the command line",
        ),
        (
            "logging: {wandb: {name: x}}\n",
            "r.yaml:3: logging.wandb.project: is missing\n  -> add it: logging.wandb.project: Project name.",
        ),
        (
            "train:\n  micro_batch_size: 5\n  global_batch_size: 32\n",
            "r.yaml:4: train.micro_batch_size: 5 does not divide train.global_batch_size 32\n"
            "  -> take a divisor, such as 4",
        ),
        (
            "model:\n  name: gpt2\n  config: {}\n",
            "r.yaml:5: model.config: model.name is given too, and the two exclude each other\n"
            "  -> keep name to load weights, or config to start from scratch",
        ),
        (
            "train: {steps: 10%}\n",
            "r.yaml:3: train.steps: 10% is a share of itself\n  -> give steps (1000) or epochs (3 epochs)",
        ),
        (
            "train: {max_time: 8}\n",
            "r.yaml:3: train.max_time: 8 given, but expected a time with its unit, more than none "
            f"(8h, 90m, 1h 30m, 2d)\n  -> {MAX_TIME}",
        ),
        (
            "eval: {patience: 3}\n",
            "r.yaml:3: eval.patience: without eval.every nothing is evaluated before the end\n"
            "  -> add eval.every, or leave it out",
        ),
        (
            "train: {steps: 0}\n",
            "r.yaml:3: train.steps: a run needs at least one step\n  -> give steps (1000) or epochs (3 epochs)",
        ),
    ],
)
def test_one_mistake_one_message(refusal, text, message):
    assert refusal(text) == message


def test_all_mistakes_are_reported_at_once(refusal):
    assert refusal("seed: x\ntrain: {steps: never, learning_rate: -1}\n", base="") == (
        "r.yaml: plugin: is missing\n  -> add it: plugin: The three functions.\n"
        f"r.yaml:2: train.steps: 'never' given, but {LENGTH}\n  -> {STEPS}\n"
        f"r.yaml:2: train.learning_rate: -1 given, but a number >= 0.0 is expected\n  -> {RATE}\n"
        "r.yaml: output_dir: is missing\n"
        "  -> add it: output_dir: Where the run lives, relative to the working directory.\n"
        "r.yaml:1: seed: 'x' given, but a whole number is expected\n"
        "  -> seed: Seed of initialisation, data order, dropout and sampling."
    )


def test_free_mappings_take_what_yaml_takes(load):
    recipe = load("model: {config: {a.b: [1, {c: null}], '': 1e-5}}\n").recipe
    assert recipe.model.config == {"a.b": [1, {"c": None}], "": 1e-5}


def test_a_whole_number_is_a_number(load):
    assert load("train: {learning_rate: 1, freeze: []}\n").recipe.train.learning_rate == 1.0


def sections(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, section
    for name in section.model_fields:
        inner = field_section(f"{prefix}.{name}" if prefix else name)
        if inner is not None:
            yield from sections(inner, f"{prefix}.{name}" if prefix else name)


def test_every_section_is_found():
    found = {section for _, section in sections()}
    known = {*Section.__subclasses__(), AdapterSection} - {AdapterSection.__base__}  # it is made in two steps
    assert found == {Recipe, *known} - {OverrideSection, OtherModelSection}


@pytest.mark.parametrize(("name", "section"), [pytest.param(*pair, id=pair[0] or "recipe") for pair in sections()])
def test_every_field_is_documented_and_every_section_closed_frozen_and_strict(name, section):
    assert [key for key, info in section.model_fields.items() if not info.description] == []
    assert section.__doc__
    config = section.model_config
    assert (config["extra"], config["frozen"], config["strict"]) == ("forbid", True, True)


def test_a_recipe_cannot_be_changed(load):
    recipe = load("").recipe
    with pytest.raises(ValidationError, match="Instance is frozen"):
        recipe.seed = 3
    with pytest.raises(ValidationError, match="Instance is frozen"):
        recipe.train.steps = 3


def test_defaults_are_valid():
    for _, section in sections():
        if not any(info.is_required() for info in section.model_fields.values()):
            section.model_validate(section().model_dump())
    assert MeshSection() == MeshSection(data=1, fsdp=1, tensor=1)
    assert TrainSection().micro_batch_size == "auto"


def properties(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        for inner in schema.values():
            yield from properties(inner)


def test_the_json_schema_is_closed_documented_and_knows_extends():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(schema["properties"]) == ["extends", *Recipe.model_fields]
    assert schema["anyOf"] == [{"required": ["extends"]}, {"required": ["plugin", "output_dir"]}]
    found = list(properties(schema))
    assert len(found) == 4 + len(set(dict(sections()).values()) - {Recipe})
    for section in found:
        assert section["additionalProperties"] is False
        assert "required" not in section
        assert all(field.get("description") for field in section["properties"].values())
    json.dumps(schema, allow_nan=False)


def test_the_shipped_json_schema_is_that_of_this_version():
    text = (shipped_directory() / "recipes" / "recipe.schema.json").read_text()
    assert json.loads(text) == json_schema(), "run: redco schema > recipes/recipe.schema.json"


def test_there_are_shipped_recipes():
    assert "quickstart" in shipped_recipes()


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name):
    path = shipped_recipes()[name]
    assert load_recipe(name, (), {}).recipe == load_recipe(path, (), {}).recipe
    assert path.read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n")


def test_tokens_may_be_drawn_from_all() -> None:
    """What `top_k: null` leaves to the model's generation config, whose default is 50."""
    assert GenerationSection(top_k=0).top_k == 0
    assert GenerationSection().top_k is None
