"""Wrong usage, interruption, and silence: with a real process where it takes one."""

import re
import signal
import time

import pytest

STARTER = ["quickstart.yaml", "plugins/python_source.py", "quickstart_prompts.jsonl", "recipe.schema.json"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tran", "recipe.yaml"], "Error: No such command 'tran'. Did you mean 'train'?"),
        (["train"], "Error: Missing argument 'RECIPE|RUN'."),
        (["train", "recipe.yaml", "--steps", "3"], "Error: No such option: --steps"),
        (
            ["predict", "run", "--show", "-1"],
            "Error: Invalid value for '--show': Input should be greater than or equal to 0",
        ),
        (["predict", "run", "--show", "all"], "Error: Invalid value for '--show': Input should be a valid integer"),
        (["predict", "run", "--input"], "Error: Option '--input' requires an argument."),
        (["doctor", "recipe.yaml"], "Error: Got unexpected extra argument(s) (recipe.yaml)"),
        (
            ["inspect-sharding", "recipe.yaml", "mesh.data=2"],
            "Error: Got unexpected extra argument(s) (mesh.data=2). This command takes no key=value: see its options, "
            "such "
            "as --mesh data=1,fsdp=4 and --batch-size of inspect-sharding, or give a recipe of two lines, `extends: "
            "RECIPE` "
            "and what differs.\n",
        ),
        (["--steps"], "Error: No such option: --steps"),
    ],
)
def test_wrong_usage(folder, arguments: list[str], error: str) -> None:
    said = folder.usage(*arguments)
    assert error in said


def test_init_of_an_unknown_recipe(folder) -> None:
    error = folder.refused("init", "new", "--recipe", "quikstart", code=2)
    assert error == "quikstart: no such shipped recipe\n  -> did you mean quickstart?"


@pytest.mark.parametrize("name", STARTER)
def test_init_touches_no_file_that_is_there(folder, name: str) -> None:
    path = folder.root / "new" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    error = folder.refused("init", "new")
    assert error == f"new/{name}: is there already\n  -> choose an empty directory: redco init DIR"


@pytest.mark.slow
def test_an_interruption_while_data_is_prepared(folder) -> None:
    folder.plugin(
        ("    return [{", "    import time\n    open('started', 'w').close()\n    time.sleep(60)\n    return [{")
    )
    process = folder.start("train", "recipe.yaml")
    deadline = time.monotonic() + 60
    while not (folder.root / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    said = "SIGINT: stopped by a signal; nothing was to be saved\n  -> run the same command to continue\n"
    assert (process.returncode, out, err) == (130, "", said)
    assert not (folder.root / "run").exists()


CHAT = """plugin: {module: causal_lm}
model:
  config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 32}
  tokenizer: byte
data:
  max_length: 16
  train: {path: json, data_files: train.jsonl}
train: {global_batch_size: 2, steps: 2, optimizer: sgd}
output_dir: run
"""
OWN_LINES = [
    r"compil(ing|ed) (train|eval) step for batches of \[.*",
    r"compiling prediction for batches of \[.*",
    r"step [24]/4  loss \d.*",
    r"eval [24]/4  loss \d.*",
]
FILES = """data: {train: {path: json, data_files: train.jsonl}, eval: {path: csv, data_files: eval.csv}}
logging: {plot: true, every: 2}
"""


@pytest.mark.slow
def test_nothing_but_redco_speaks_while_it_trains(folder) -> None:
    """JAX, orbax, absl, datasets and matplotlib are at work here."""
    recipe = folder.recipe.replace("logging: {every: 1, plot: false}\n", FILES)
    folder.write(recipe__yaml=recipe, train__jsonl='{"x": 1, "y": 0}\n' * 16, eval__csv="x,y\n1,0\n2,1\n")
    folder.plugin(("def load_examples", "def unused"), ('[e["x"] for e in examples]', '[[e["x"]] for e in examples]'))
    process = folder.start("train", "recipe.yaml", "eval.predict=true")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert [line for line in err.splitlines() if not any(re.fullmatch(own, line) for own in OWN_LINES)] == []
    assert out.startswith("evaluations\n")


@pytest.mark.slow
def test_nothing_but_redco_speaks_while_a_named_model_is_made(folder) -> None:
    """And transformers here."""
    folder.write(recipe__yaml=CHAT, train__jsonl='{"text": "hello"}\n' * 4)
    process = folder.start("validate", "recipe.yaml")
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "valid\n")


@pytest.mark.slow
def test_a_warning_is_a_line_of_redco(folder) -> None:
    folder.plugin(("    return Net()", "    import warnings\n    warnings.warn('this model is old')\n    return Net()"))
    process = folder.start("validate", "recipe.yaml")
    _, err = process.communicate(timeout=200)
    assert err == f"warning: this model is old (UserWarning at {folder.root}/plugin.py:16)\nvalid\n"


@pytest.mark.slow
def test_libraries_do_not_log_the_error_that_redco_explains(folder) -> None:
    folder.write(recipe__yaml=CHAT, train__jsonl='{"text": "hello"}\n{"text": \n')
    out, err = (process := folder.start("validate", "recipe.yaml")).communicate(timeout=200)
    assert (process.returncode, out, err) == (
        1,
        "",
        "recipe.yaml:7: data.train.data_files: train.jsonl:2: not JSON: Expecting value at column 9\n"
        "  -> repair or replace the file, or leave it out\n",
    )
