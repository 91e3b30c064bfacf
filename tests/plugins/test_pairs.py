"""Pairs of texts: claims that hold of a line, how well a line is described, and lines that training has never seen."""

import ast
from collections import Counter

import numpy as np
import pytest

from redco_cli.plugin import parts
from redco_cli.plugin.parts import builtin, held_out
from redco_cli.run import train
from tests.training.tiny import recorded

pairs = builtin("source_pairs")
SMALL = [
    *(f"model.config.{name}_size=16" for name in ("hidden", "embedding", "intermediate")),
    "model.config.num_hidden_layers=1",
    "plugin.options.train_examples=220",
    "plugin.options.eval_examples=40",
    "train.steps=2",
    "train.warmup=0",
    "logging.every=1",
    "logging.plot=false",
]


def of(line):
    return pairs.true_of(ast.parse(line).body[0])


@pytest.fixture
def few(monkeypatch):
    """Lines of one module."""
    source = {"argparse": pairs.standard_library()["argparse"], "cgi": "x = a and b\nx = [a + b]\nassert x < y\n"}
    extra = {f"x = a and [b_{i}] + 1 < c": of(f"x = a and [b_{i}] + 1 < c") for i in range(40)}
    monkeypatch.setattr(pairs, "standard_library", lambda: source)
    known = {**pairs.lines.__wrapped__(), **extra}
    monkeypatch.setattr(pairs, "lines", lambda: known)
    return known


@pytest.mark.parametrize(
    ("line", "true"),
    [
        ("import os", set()),
        ("x = f(y)", {"call", "value"}),
        ("return x[0].y", {"attribute", "item", "number"}),
        ("x += [True] + y", {"value", "list", "add"}),
        ("assert a < 'b' or a", {"text", "compare", "logic", "twice"}),
    ],
)
def test_what_is_true_of_a_line(line, true):
    assert of(line) == true


def test_lines_are_whole_statements_and_short(few):
    assert all(len(ast.parse(line).body) == 1 for line in few)
    assert max(len(line) for line in few) <= pairs.LONGEST


def test_claims_are_balanced_and_right(context, few):
    ctx = context("source_pairs", train_examples=440, eval_examples=88, eval_share=0.3)
    for split in ("train", "eval"):
        made = pairs.load_examples(ctx, split)
        counts = Counter((one["hypothesis"], one["label"]) for one in made)
        assert set(counts.values()) == {len(made) // 22}
        assert len(counts) == 22
        for one in made:
            true = [pairs.CLAIMS[name][0] for name in few[one["premise"]]]
            assert one["label"] == (one["hypothesis"] in true)
            assert held_out(one["premise"], 0.3) == (split == "eval")


def test_scores_are_shares_of_what_is_true(context, few):
    ctx = context("source_pairs", question="likeness", train_examples=200, eval_examples=50, eval_share=0.3)
    training, evaluation = pairs.load_examples(ctx, "train"), pairs.load_examples(ctx, "eval")
    assert Counter(one["label"] for one in training) == dict.fromkeys((0, 1.25, 2.5, 3.75, 5), 40)
    assert len(evaluation) == 50
    assert evaluation == pairs.load_examples(ctx, "eval")
    for one in evaluation:
        assert held_out(one["sentence1"], 0.3)
        named = one["sentence2"].split()
        assert len(set(named)) == 4
        assert one["label"] == 5 * len(few[one["sentence1"]].intersection(named)) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "loss", "scores"),
    [
        ("pairs", np.log(2), {"accuracy", "f1", "macro_f1", "matthews"}),
        (
            "similarity",
            np.mean(np.square([0, 1.25, 2.5, 3.75, 5])),
            {"pearson", "spearman", "mean_absolute_error"},
        ),
    ],
)
def test_recipes_of_pairs_begin_where_nothing_is_known(recipe, loss, scores, tmp_path, monkeypatch):
    """A small model and the lines of a module: the loss of the first step, and GLUE's metrics of the last."""
    made = "\n".join(f"x = a and [b_{i}] + 1 < a" for i in range(40))
    few = {"argparse": parts.standard_library()["argparse"], "made": made}
    monkeypatch.setattr(parts, "standard_library", lambda: few)
    result = train(recipe, [*SMALL, "mesh.data=1", f"output_dir={tmp_path}"])
    losses = [one["loss"] for one in recorded(tmp_path) if one["kind"] == "train"]
    assert losses[0] == pytest.approx(loss, rel=0.3)
    assert result.evaluations[-1][1].keys() >= scores
