"""Rows as people have them, through the built-in plugins: `validate` and `train` name file, line and column alike."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

LLAMA = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}, "
    "task: causal_lm"
)
T5 = (
    "{model_type: t5, d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_decoder_layers: 1, num_heads: 2}, "
    "task: seq2seq"
)
BERT = (
    "{model_type: bert, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    "max_position_embeddings: 32, id2label: {0: no, 1: yes}}, task: sequence_classification"
)
MODELS = {
    "causal_lm": LLAMA,
    "instruct": LLAMA,
    "python_source": LLAMA,
    "seq2seq": T5,
    "dates": T5,
    "text_classification": BERT,
    "statements": BERT,
}
RECIPE = """data:
  train: {{path: json, data_files: train.jsonl}}
  max_length: 32
plugin: {{module: {plugin}}}
train: {{global_batch_size: 4, steps: 3}}
logging: {{every: 1, plot: false}}
mesh: {{data: 1}}
output_dir: run
"""
KIND = "\n  -> correct that row or leave it out, or name another column in plugin.options"
SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
GOOD: dict[str, dict[str, Any]] = {
    "causal_lm": {"text": "hello"},
    "python_source": {"text": "x" * 32},
    "instruct": {"messages": SAID},
    "seq2seq": {"source": "three", "target": "3"},
    "dates": {"source": "March 3, 1999", "target": "1999-03-03"},
    "text_classification": {"text": "good", "label": "yes"},
    "statements": {"text": "good", "label": "yes"},
    "image_classification": {"image": [[[0.5]] * 8] * 8, "label": 3},
}


@dataclass(frozen=True)
class Case:
    """What the seventh of twelve rows has instead of a good row's, and the error behind its place."""

    plugin: str
    row: dict[str, Any]
    error: str
    overrides: Sequence[str] = ()


CASES = {
    "a number": Case("causal_lm", {"text": 3}, f"the column 'text' holds 3, a number, but text is expected{KIND}"),
    "a number, streamed and shuffled": Case(
        "causal_lm",
        {"text": 3},
        f"the column 'text' holds 3, a number, but text is expected{KIND}",
        ["data.streaming=true", "data.shuffle_buffer=5"],
    ),
    "a null": Case("causal_lm", {"text": None}, f"the column 'text' is null or missing, but text is expected{KIND}"),
    "a null source": Case(
        "seq2seq", {"source": None}, f"the column 'source' is null or missing, but text is expected{KIND}"
    ),
    "a number for a target": Case(
        "dates", {"target": 1999}, f"the column 'target' holds 1999, a number, but text is expected{KIND}"
    ),
    "a list": Case(
        "python_source", {"text": ["a"]}, f"the column 'text' holds ['a'], a list, but text is expected{KIND}"
    ),
    "a misspelt role": Case(
        "instruct",
        {"messages": [SAID[0], {"role": "asistant", "content": "yo"}]},
        (
            "message 2 in the column 'messages' has the role 'asistant', but roles are system, developer, user, "
            "assistant, tool, function\n  -> did you mean assistant? correct the role in the data"
        ),
    ),
    "a null in a message": Case(
        "instruct",
        {"messages": [SAID[0], {"role": "assistant", "content": None}]},
        f"the content of message 2 in the column 'messages' is null or missing, but text is expected{KIND}",
    ),
    "a null label": Case(
        "text_classification",
        {"label": None},
        (
            "the label None in the column 'label' is none of the model's classes: no, yes\n"
            "  -> list every class in model.config.id2label, or correct the data"
        ),
    ),
    "an unknown label": Case(
        "statements",
        {"label": "ye"},
        (
            "the label 'ye' in the column 'label' is none of the model's classes: no, yes\n"
            "  -> list every class in model.config.id2label, or correct the data"
        ),
    ),
    "a class that there is not": Case(
        "image_classification",
        {"label": 77},
        "the column 'label' holds 77, but classes go from 0 to 9\n  -> correct the data, or set plugin.options.classes",
    ),
    "a null for an image": Case(
        "image_classification",
        {"image": None},
        (
            "the column 'image' is null or missing, but an image is expected\n  -> correct that row or leave it out; "
            "a file name becomes an image when the dataset declares that column as one"
        ),
    ),
}


def prepared(folder, plugin: str, rows: Sequence[dict[str, Any]]) -> None:
    model = f"model: {{config: {MODELS[plugin]}, tokenizer: byte}}\n" if plugin in MODELS else ""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    folder.write(recipe__yaml=model + RECIPE.format(plugin=plugin), train__jsonl=f"\n{lines}")


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_refused_with_its_line(folder, name):
    case, good = CASES[name], GOOD[CASES[name].plugin]
    prepared(folder, case.plugin, [{**good, **case.row} if row == 6 else good for row in range(12)])
    for command in ("validate", "train"):
        assert folder.refused(command, "recipe.yaml", *case.overrides) == f"train.jsonl:8: {case.error}"


def test_a_row_is_found_where_training_meets_it(folder):
    good = GOOD["causal_lm"]
    prepared(folder, "causal_lm", [good] * 11 + [{"text": 3}])
    error = f"train.jsonl:13: {CASES['a number'].error}"
    assert folder.refused("validate", "recipe.yaml") == error
    assert folder.refused("train", "recipe.yaml", leaves=["run(/.*)?"]) == error


def test_a_row_to_predict_is_refused_with_its_line(folder):
    prepared(folder, "causal_lm", [GOOD["causal_lm"]] * 4)
    folder.write(in__jsonl='{"prompt": "a"}\n\n{"prompt": 3}\n')
    assert folder.refused("predict", "recipe.yaml", "--input", "in.jsonl") == (
        f"in.jsonl:3: the column 'prompt' holds 3, a number, but text is expected{KIND}"
    )


def test_a_plugin_of_ones_own_is_told_the_line(folder):
    folder.plugin(("def load_examples", "def unused"))
    folder.write(recipe__yaml=RECIPE.format(plugin="plugin.py"))
    rows = [{"x": [1.0, 2.0], "y": 1}] * 7 + [{"x": [1.0, 2.0], "y": "one"}]
    folder.write(train__jsonl="".join(json.dumps(row) + "\n" for row in rows))
    folder.plugin(("def load_examples", "def unused"), ('e["y"] for', 'int(e["y"]) for'))
    assert folder.refused("train", "recipe.yaml") == (
        'plugin.py:24: collate_fn: collate_fn raised ValueError at `y = np.array([int(e["y"]) for e in examples])`: '
        "invalid literal for int() with base 10: 'one'\n"
        "  on example 8 of 8, with keys x, y, from train.jsonl:8\n"
        "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
    )


@pytest.mark.slow
def test_cut_and_empty_rows_are_told(folder):
    rows = [GOOD["causal_lm"]] * 9 + [{"text": "x" * 2_000_000}, {"text": ""}, {"text": "y" * 32}]
    prepared(folder, "causal_lm", rows)
    document = json.loads(folder.done("validate", "recipe.yaml", "--json")[0])
    assert document["rows"]["train"] == {
        "looked_at": 12,
        "all": True,
        "with an empty 'text'": {"rows": 1, "at": ["train.jsonl:12"]},
        "longer than data.max_length 32, and cut": {"rows": 2, "at": ["train.jsonl:11", "train.jsonl:13"]},
        "without a token that carries loss": {"rows": 1, "at": ["train.jsonl:12"]},
    }
    _, said = folder.done("train", "recipe.yaml", "train.steps=7")
    told = [line for line in said.splitlines() if "rows" in line]
    (line,) = told  # once, though the data is read twice
    assert line.startswith("recipe.yaml:3: data.train: ")
    assert " of 12 rows " in line
    assert {"2", "1"} == {part.split()[0] for part in line.removeprefix("recipe.yaml:3: data.train: ").split("; ")}


@pytest.mark.slow
def test_cut_prompts_are_told(folder):
    prepared(folder, "causal_lm", [GOOD["causal_lm"]] * 4)
    folder.done("train", "recipe.yaml", "train.steps=1")
    folder.write(in__jsonl="".join(json.dumps({"prompt": "x" * size}) + "\n" for size in (1, 33, 40, 32, 0)))
    _, said = folder.done("predict", "recipe.yaml", "--input", "in.jsonl", "predict.generation.max_new_tokens=1")
    assert sorted(said.splitlines()[-1].split("; ")) == [
        "1 with an empty 'prompt'",
        "2 of 5 rows longer than data.max_length 32, and cut",
    ]


def test_nothing_to_learn_is_an_error(folder):
    prepared(folder, "causal_lm", [{"text": ""}] * 12)
    error = (
        "recipe.yaml:3: data.train: nothing to learn: 12 of 12 rows without a token that carries loss; "
        "12 with an empty 'text'\n"
        "  -> correct the data or the columns in plugin.options; where rows are cut, raise data.max_length"
    )
    assert folder.refused("validate", "recipe.yaml") == error
    assert folder.refused("train", "recipe.yaml", leaves=["run(/.*)?"]) == (error)


@pytest.mark.slow
def test_a_batch_without_loss_is_allowed(folder):
    prepared(folder, "causal_lm", [{"text": ""}] * 4 + [GOOD["causal_lm"]] * 8)
    _, said = folder.done("train", "recipe.yaml", "data.shuffle=false", "data.packing=false")
    assert "warning: step 1: no position of the batch carries loss; the update is skipped (1 in a row)\n" in said


def test_shapes_and_weights_are_shown(folder):
    turns = [
        {"from": "human", "value": "é?"},
        {"from": "gpt", "value": "yo", "weight": 0.5},
        {"from": "gpt", "value": "2"},
    ]
    prepared(folder, "instruct", [{"conversations": turns}] * 11 + [{"messages": SAID}])
    shown = folder.done("validate", "recipe.yaml", "plugin.options.weights=true", "data.max_length=64")[0]
    assert (
        "training example 1, ShareGPT in 'conversations' (5 of 37 tokens carry loss)\n"
        "user: é?<eos>assistant: [loss 0.5]yo<eos>[/loss]assistant: [loss]2<eos>[/loss]\n"
    ) in shown
    assert "ShareGPT in 'conversations'" in shown.partition("rows")[2]
    assert "messages in 'messages'" in shown.partition("rows")[2]


def test_texts_like_dates_are_read_as_text(folder):
    prepared(folder, "dates", [GOOD["dates"]] * 12)
    assert " => [loss]1999-03-03<eos>[/loss]" in folder.done("validate", "recipe.yaml")[0]
