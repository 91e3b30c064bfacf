"""Recipes as people get them wrong, and devices that do not fit: refused at once, each with its line."""

from dataclasses import dataclass, field

import pytest

from redco_cli.recipe.shipped import shipped_recipes

RECIPE = """plugin: {module: plugin.py}
train: {global_batch_size: 4, steps: 4, optimizer: sgd, schedule: constant, max_grad_norm: null}
eval: {every: 2}
checkpoint: {every: 2, keep: 2}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""


@dataclass(frozen=True)
class Case:
    """A recipe and overrides, and the whole error of `redco validate`."""

    error: str
    recipe: str | bytes = RECIPE
    overrides: tuple[str, ...] = ()
    code: int = 1
    others: dict[str, str] = field(default_factory=dict)


CASES = {
    "a folder": Case(
        (".: is a directory, not a recipe\n  -> name the .yaml file in it"), overrides=("DIRECTORY",), code=2
    ),
    "missing": Case(
        (
            "recipes.yaml: no such recipe, neither a file nor shipped with redco\n"
            f"  -> known: {', '.join(shipped_recipes())}"
        ),
        overrides=("MISSING",),
        code=2,
    ),
    "binary": Case(
        (
            "recipe.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff in position 5: invalid "
            "start byte\n"
            "  -> check the path, its permissions and that it is UTF-8"
        ),
        recipe=b"PK\x03\x04\x00\xff\xfe\x00",
        code=2,
    ),
    "latin-1": Case(
        (
            "recipe.yaml: cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 15: invalid "
            "continuation byte\n"
            "  -> check the path, its permissions and that it is UTF-8"
        ),
        recipe="output_dir: café\n".encode("latin-1"),
        code=2,
    ),
    "utf-16": Case(
        (
            "recipe.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: invalid "
            "start byte\n"
            "  -> check the path, its permissions and that it is UTF-8"
        ),
        recipe=RECIPE.encode("utf-16"),
        code=2,
    ),
    "empty": Case(
        ("recipe.yaml: a recipe is a mapping, but this file holds nothing\n  -> start from `redco init`"), recipe=""
    ),
    "only comments": Case(
        ("recipe.yaml: a recipe is a mapping, but this file holds nothing\n  -> start from `redco init`"),
        recipe="# soon\n",
    ),
    "a list": Case(
        ("recipe.yaml: a recipe is a mapping, but this file holds list\n  -> start from `redco init`"),
        recipe="- plugin\n- train\n",
    ),
    "a text": Case(
        ("recipe.yaml: a recipe is a mapping, but this file holds str\n  -> start from `redco init`"),
        recipe="train please\n",
    ),
    "tabs": Case(
        (
            "recipe.yaml:2: not valid YAML: while scanning for the next token found character '\\t' that "
            "cannot start any token\n"
            "  -> check the indentation and quotes near that line"
        ),
        recipe="plugin:\n\tmodule: plugin.py\n",
    ),
    "unclosed": Case(
        (
            "recipe.yaml:2: not valid YAML: while parsing a flow mapping expected ',' or '}', but got "
            "':'\n"
            "  -> check the indentation and quotes near that line"
        ),
        recipe=RECIPE.replace("plugin.py}", "plugin.py"),
    ),
    "two documents": Case(
        (
            "recipe.yaml:8: not valid YAML: expected a single document in the stream but found another "
            "document\n"
            "  -> check the indentation and quotes near that line"
        ),
        recipe=RECIPE + "---\nseed: 1\n",
    ),
    "a tag": Case(
        (
            "recipe.yaml:8: the tag !!python/object/apply:os.system is not allowed\n"
            "  -> remove the tag; quotes make a value text"
        ),
        recipe=RECIPE + "seed: !!python/object/apply:os.system [ls]\n",
    ),
    "a repeated key": Case(
        ("recipe.yaml:8: output_dir: already given on line 7\n  -> keep one of the two"),
        recipe=RECIPE + "output_dir: other\n",
    ),
    "an unknown section": Case(
        ("recipe.yaml:8: trian: unknown key\n  -> did you mean train?"), recipe=RECIPE + "trian: {steps: 3}\n"
    ),
    "an unknown key": Case(
        ("recipe.yaml:2: train.step: unknown key\n  -> did you mean steps?"),
        recipe=RECIPE.replace("steps: 4", "step: 4"),
    ),
    "an unknown key further down": Case(
        ("recipe.yaml:8: data.train.data_file: unknown key\n  -> did you mean data_files?"),
        recipe=RECIPE + "data: {train: {path: json, data_file: a.jsonl}}\n",
    ),
    "a missing section": Case(
        ("recipe.yaml: plugin: is missing\n  -> add it: plugin: The three functions."), recipe="output_dir: run\n"
    ),
    "a missing key": Case(
        (
            "recipe.yaml: output_dir: is missing\n"
            "  -> add it: output_dir: Where the run lives, relative to the working directory."
        ),
        recipe="plugin: {module: plugin.py}\n",
    ),
    "a section that is a text": Case(
        ("recipe.yaml:2: train: 'fast' given, but a mapping (key: value) is expected\n  -> train: How to train."),
        recipe="plugin: {module: plugin.py}\ntrain: fast\noutput_dir: run\n",
    ),
    "numbers in quotes": Case(
        (
            "recipe.yaml:2: train.global_batch_size: '4' given, but a whole number is expected\n"
            "  -> train.global_batch_size: Examples per optimizer step, over all devices and "
            "micro-batches.\n"
            "recipe.yaml:2: train.steps: '4' given, but expected a number of optimizer steps (1000) or "
            "epochs (3 epochs)\n"
            "  -> train.steps: Length of the run: optimizer steps or epochs."
        ),
        recipe=RECIPE.replace("size: 4", 'size: "4"').replace("steps: 4", 'steps: "4"'),
    ),
    "several mistakes": Case(
        (
            "command line: train.global_batch_size: 8.5 given, but a whole number is expected\n"
            "  -> train.global_batch_size: Examples per optimizer step, over all devices and "
            "micro-batches.\n"
            "command line: train.steps: 'fast' given, but expected a number of optimizer steps (1000) or "
            "epochs (3 epochs)\n"
            "  -> train.steps: Length of the run: optimizer steps or epochs.\n"
            "command line: eval.predict: 'maybe' given, but true or false is expected\n"
            "  -> eval.predict: Also run `predict_fn` and `metric_fn` on the eval examples.\n"
            "command line: seed: -1 given, but a number >= 0 is expected\n"
            "  -> seed: Seed of initialisation, data order, dropout and sampling."
        ),
        overrides=("train.steps=fast", "train.global_batch_size=8.5", "eval.predict=maybe", "seed=-1"),
    ),
    "a learning rate of zero": Case(
        (
            "command line: train.learning_rate: -1 given, but a number >= 0.0 is expected\n"
            "  -> train.learning_rate: Peak learning rate."
        ),
        overrides=("train.learning_rate=-1",),
    ),
    "a learning rate that is no number": Case(
        ("command line: train.learning_rate: .nan is not a finite number\n  -> give a finite one"),
        overrides=("train.learning_rate=.nan",),
    ),
    "no steps": Case(
        ("command line: train.steps: a run needs at least one step\n  -> give steps (1000) or epochs (3 epochs)"),
        overrides=("train.steps=0",),
    ),
    "negative steps": Case(
        (
            "command line: train.steps: -5 given, but expected a positive number of optimizer steps (1000) or "
            "epochs (3 epochs)\n"
            "  -> train.steps: Length of the run: optimizer steps or epochs."
        ),
        overrides=("train.steps=-5",),
    ),
    "a share of itself": Case(
        ("command line: train.steps: 10% is a share of itself\n  -> give steps (1000) or epochs (3 epochs)"),
        overrides=("train.steps=10%",),
    ),
    "an empty batch": Case(
        (
            "command line: train.global_batch_size: 0 given, but a number > 0 is expected\n"
            "  -> train.global_batch_size: Examples per optimizer step, over all devices and "
            "micro-batches."
        ),
        overrides=("train.global_batch_size=0",),
    ),
    "a micro-batch that does not divide": Case(
        (
            "command line: train.micro_batch_size: 3 does not divide train.global_batch_size 4\n"
            "  -> take a divisor, such as 2"
        ),
        overrides=("train.micro_batch_size=3",),
    ),
    "devices that do not divide": Case(
        (
            "recipe.yaml:2: train.global_batch_size: a global batch of 4 examples cannot be split evenly "
            "over 3 devices\n"
            "  -> take a multiple of 3, such as 3 or 6, or fewer devices for data and fsdp: those of tensor share "
            "every example"
        ),
        overrides=("mesh.data=3",),
    ),
    "more devices than there are": Case(
        "recipe.yaml:6: mesh: data 16 takes 16 devices, but 8 cpu devices found\n"
        "  -> take mesh: auto, or sizes with a product of 8",
        overrides=("mesh.data=16", "train.global_batch_size=16"),
    ),
    "a warm-up longer than the run": Case(
        ("command line: train.warmup: 30 is 30 steps, longer than the run of 4\n  -> warm up for a share, such as 5%"),
        overrides=("train.warmup=30",),
    ),
    "evaluation every zero steps": Case(
        ("command line: eval.every: 0 is 0 steps\n  -> give at least 1 step"), overrides=("eval.every=0",)
    ),
    "freezing by no regular expression": Case(
        (
            "command line: train.freeze: '(' is no regular expression: missing ), unterminated "
            "subpattern at position 0\n"
            "  -> escape special signs"
        ),
        overrides=("train.freeze=['(']",),
    ),
    "freezing what is not there": Case(
        (
            "command line: train.freeze: 'embed.*' matches no parameter path\n"
            "  -> paths look like Dense_0/bias, Dense_0/kernel"
        ),
        overrides=("train.freeze=[embed.*]",),
    ),
    "a metric that there will not be": Case(
        (
            "command line: eval.best_metric: evaluation gives no accuracy\n"
            "  -> it gives loss; for those of metric_fn set eval.predict: true"
        ),
        overrides=("eval.best_metric=accuracy",),
    ),
    "extending nothing": Case(
        (
            "recipe.yaml:1: extends: base.yaml: no such recipe, neither a file nor shipped with redco\n"
            f"  -> known: {', '.join(shipped_recipes())}"
        ),
        recipe="extends: base.yaml\n" + RECIPE,
    ),
    "extending in a circle": Case(
        ("recipe.yaml: extends: the recipes extend each other in a circle\n  -> remove one `extends`"),
        recipe="extends: b.yaml\n" + RECIPE,
        others={"b.yaml": "extends: recipe.yaml\n"},
    ),
    "an override without a value": Case(
        ("command line: train.steps: is no override\n  -> write key=value, such as train.steps=100"),
        overrides=("train.steps",),
        code=2,
    ),
    "an override of an unknown key": Case(
        ("command line: train.stepz: unknown key\n  -> did you mean steps?"), overrides=("train.stepz=3",)
    ),
    "an override that is no YAML": Case(
        (
            "command line: train.freeze: not valid YAML: while parsing a flow sequence expected ',' or "
            "']', but got '<stream end>'\n"
            "  -> quote the value"
        ),
        overrides=("train.freeze=[a",),
    ),
    "an output below a file": Case(
        (
            "command line: output_dir: plugin.py/run cannot be made: plugin.py is no directory\n"
            "  -> choose another output_dir, or correct its permissions"
        ),
        overrides=("output_dir=plugin.py/run",),
    ),
    "resuming from nowhere": Case(
        (
            "command line: checkpoint.resume: atuo is no checkpoint\n"
            "  -> give auto, never, or a directory such as runs/x/checkpoint-100"
        ),
        overrides=("checkpoint.resume=atuo",),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", ["validate", "train"])
def test_a_recipe_is_refused(folder, name: str, command: str) -> None:
    case = CASES[name]
    folder.write(**{"recipe__yaml": case.recipe, **{key.replace(".", "__"): text for key, text in case.others.items()}})
    arguments = {("DIRECTORY",): (".",), ("MISSING",): ("recipes.yaml",)}.get(
        case.overrides, ("recipe.yaml", *case.overrides)
    )
    assert folder.refused(command, *arguments, code=case.code) == case.error


@pytest.mark.parametrize(
    ("variable", "error"),
    [
        (
            "REDCO_TRAIM__STEPS",
            ("environment REDCO_TRAIM__STEPS: traim is no key of a recipe\n  -> did you mean train?"),
        ),
        (
            "REDCO_TRAIN__STEPS",
            (
                "environment REDCO_TRAIN__STEPS: train.steps: 'lots' given, but expected a number of "
                "optimizer steps (1000) or epochs (3 epochs)\n"
                "  -> train.steps: Length of the run: optimizer steps or epochs."
            ),
        ),
    ],
)
def test_an_environment_variable_is_refused(folder, monkeypatch: pytest.MonkeyPatch, variable: str, error: str) -> None:
    monkeypatch.setenv(variable, "lots")
    assert folder.refused("validate", "recipe.yaml") == error
