"""Predictions of what is typed: a text, or JSON lines on standard input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.plugin.load import load_plugin
from redco_cli.prediction.prompt import prompt_example
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict, predict_examples, train

RECIPE = """
plugin: {module: causal_lm, options: {prompt: ask}}
model:
  config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 32}
  tokenizer: byte
data: {max_length: 8, train: {path: json, data_files: train.jsonl}}
train: {global_batch_size: 2, steps: 1, optimizer: sgd}
predict: {generation: {max_new_tokens: 4}}
logging: {plot: false}
mesh: {data: 1}
output_dir: run
"""
TWICE = "is given too, and the two exclude each other"
ALL = "--show: --input - prints every prediction, unless there is an --output"
PICTURES = """
plugin: {module: image_classification, options: {channels: 1}}
train: {steps: 1}
logging: {plot: false}
mesh: {data: 1}
output_dir: run
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prompts")
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "train.jsonl").write_text('{"text": "hello"}\n' * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        train("recipe.yaml")
    return root


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def command(*arguments: str, typed: str | None = None) -> Any:
    return CliRunner().invoke(app, ["predict", "run", *arguments], input=typed)


@pytest.mark.parametrize(
    ("module", "options", "column"),
    [
        ("causal_lm", {}, "prompt"),
        ("causal_lm", {"prompt": "ask"}, "ask"),
        ("instruct", {}, "prompt"),
        ("python_source", {}, "prompt"),
        ("seq2seq", {"source": "english"}, "english"),
        ("dates", {}, "source"),
        ("text_classification", {}, "text"),
    ],
)
def test_the_column_is_the_one_that_the_plugin_reads(
    tmp_path: Path, module: str, options: dict[str, str], column: str
) -> None:
    (tmp_path / "r.yaml").write_text(f"plugin: {json.dumps({'module': module, 'options': options})}\noutput_dir: o\n")
    loaded = load_recipe(tmp_path / "r.yaml", (), {})
    plugin = load_plugin(loaded.recipe.plugin, loaded.directory, loaded.where)
    assert prompt_example("hello")(plugin) == [{column: "hello"}]


def test_a_text(here: Path) -> None:
    lines = predict_examples("run", "hey")
    assert [(line["index"], line["example"]) for line in lines] == [(0, {"ask": "hey"})]
    assert lines == predict_examples("run", [{"ask": "hey"}])
    done = command("--prompt", "hey")
    assert (done.exit_code, done.stdout) == (0, f"{lines[0]['prediction']}\n")
    document = json.loads(command("--prompt", "hey", "--json").stdout)
    assert document == {"examples": 1, "predictions": lines}
    assert not (here / "run/predictions").exists()


@pytest.mark.slow
def test_standard_input(here: Path) -> None:
    typed = '{"ask": "hey"}\n\n{"ask": "you"}\n'
    (here / "input.jsonl").write_text(typed)
    lines = predict("run", input="input.jsonl").read_text()
    done = command("--input", "-", typed=typed)
    assert (done.exit_code, done.stdout) == (0, lines)
    done = command("--input", "-", "--output", "typed.jsonl", typed=typed)
    assert done.stdout.split() == ["output", "typed.jsonl", "examples", "2"]
    assert (here / "typed.jsonl").read_text() == lines


@pytest.mark.parametrize(
    ("arguments", "typed", "code", "message"),
    [
        (["--prompt", "a", "--input", "x"], None, 2, f"--prompt: --input {TWICE}"),
        (
            ["--prompt", "a", "--output", "x"],
            None,
            2,
            f"--prompt: --output {TWICE}",
        ),
        (["--prompt", "a", "--show", "1"], None, 2, f"--prompt: --show {TWICE}"),
        (
            ["--input", "-", "--show", "1"],
            "",
            2,
            ALL,
        ),
        (["--input", "-"], "", 1, "standard input: holds no examples"),
        (["--input", "-"], "3\n", 1, "standard input:1: holds a number, but an object is expected"),
        (["--input", "-"], '{"a": 1}\n', 1, "standard input:1: an example has no column 'text'; it has 'a'"),
    ],
)
def test_refusals(here: Path, arguments: list[str], typed: str | None, code: int, message: str) -> None:
    done = command(*arguments, typed=typed)
    assert (done.exit_code, done.stdout, done.stderr.splitlines()[0]) == (code, "", message)


@pytest.mark.slow
def test_a_plugin_that_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(PICTURES)
    command = ["predict", "r.yaml", "--prompt", "hey"]
    assert CliRunner().invoke(app, command).stderr == "run: holds no checkpoint\n  -> train first: redco train\n"
    train("r.yaml")
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.stdout, done.stderr) == (
        2,
        "",
        "--prompt: the plugin does not predict from a text alone: an example has no column 'image'; "
        "it has 'prompt'\n  -> give whole examples: --input FILE, or JSON lines to --input -\n",
    )


CHAT = """
plugin: {module: instruct, options: {messages: turns}}
model:
  config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 96}
  tokenizer: byte
data: {max_length: 64, train: {path: json, data_files: train.jsonl}}
train: {global_batch_size: 2, steps: 1, optimizer: sgd}
predict: {generation: {max_new_tokens: 4}}
logging: {plot: false}
mesh: {data: 1}
output_dir: run
"""


@pytest.mark.slow
def test_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(CHAT)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    Path("train.jsonl").write_text(f"{json.dumps({'turns': turns})}\n" * 2)
    train("r.yaml")
    first, second = {"role": "user", "content": "hey"}, {"role": "user", "content": "and now?"}
    (answer,) = predict_examples("run", [{"turns": [first]}])
    answered = {"role": "assistant", "content": answer["prediction"]}
    (then,) = predict_examples("run", [{"turns": [first, answered, second]}])
    done = command("--chat", typed="hey\n\nand now?\n")
    assert done.exit_code == 0
    assert done.stdout == f"{answer['prediction']}\n{then['prediction']}\n"


def test_a_plugin_that_knows_no_conversation(here: Path) -> None:
    done = command("--chat", typed="hey\n")
    assert done.exit_code == 2
    assert done.stderr.startswith("--chat: the plugin does not predict from a conversation alone: ")
    done = command("--chat", "--prompt", "a")
    assert (done.exit_code, done.stderr.splitlines()[0]) == (2, f"--chat: --prompt {TWICE}")
