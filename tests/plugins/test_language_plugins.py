"""causal_lm, python_source and seq2seq: what goes into a batch, what is predicted, what the loss counts."""

import ast

import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.models.config.byte_tokenizer import EOS, PAD
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.parts import builtin, held_out, standard_library
from tests.plugins.conftest import collate
from tests.plugins.trained import trained


def text_of(ids):
    return "".join(chr(i) if 0 <= i < 256 else {PAD: "_", EOS: "$", IGNORED_LABEL: "."}[i] for i in ids)


def test_causal_lm_ends_cuts_and_pads(context):
    plugin = builtin("causal_lm")
    batch = collate(plugin, context("causal_lm", max_length=6), [{"text": "abc"}, {"text": "abcdefgh"}])
    assert [text_of(row) for row in batch["input_ids"]] == ["abc$__", "abcdef"]
    assert [text_of(row) for row in batch["labels"]] == ["abc$..", "abcdef"]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]


def test_causal_lm_counts_what_is_predicted(context, logits_model):
    plugin = builtin("causal_lm")
    model = logits_model()
    ctx = context("causal_lm", max_length=6, model=model)
    batch = collate(plugin, ctx, [{"text": "abc"}, {"text": "abcdefgh"}])
    loss = plugin.loss_fn(ctx, jnp.zeros((2, 6, 260)), batch, None, True)
    assert loss.weight == 3 + 5
    assert loss.sum / loss.weight == pytest.approx(np.log(260), rel=1e-6)
    assert set(model.calls[0][1]) == {"input_ids", "attention_mask", "rng", "train"}


def test_causal_lm_continues_the_end_of_prompts(context):
    plugin = builtin("causal_lm")
    ctx = context("causal_lm", max_length=4, stage="predict", prompt="start")
    batch = collate(plugin, ctx, [{"start": "ab"}, {"start": "abcdef"}])
    assert [text_of(row) for row in batch["input_ids"]] == ["__ab", "cdef"]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert "labels" not in batch
    assert text_of(collate(plugin, ctx, [{"text": "xy"}])["input_ids"][0]) == "__xy"
    assert plugin.output_fn(ctx, np.array([[104, 105, EOS, PAD]])) == ["hi"]


def test_python_source_splits_by_module_and_predicts_each_byte_once(context):
    plugin = builtin("python_source")
    ctx = context("python_source", max_length=128, eval_share=0.1, eval_windows=5)
    train, evaluation = plugin.load_examples(ctx, "train"), plugin.load_examples(ctx, "eval")
    modules = standard_library()
    source = "\n".join(text for name, text in modules.items() if not held_out(name, 0.1))
    rebuilt = train[0]["text"] + "".join(example["text"][1:] for example in train[1:])
    assert source.startswith(rebuilt)
    assert len(source) - len(rebuilt) < 128
    held = "\n".join(text for name, text in modules.items() if held_out(name, 0.1))
    assert len(evaluation) == 5
    assert all(example["text"] in held and example["prompt"] == example["text"][:64] for example in evaluation)
    assert evaluation == plugin.load_examples(ctx, "eval")


def test_python_source_batches_are_bytes(context, logits_model):
    plugin = builtin("python_source")
    ctx = context("python_source", max_length=5, model=logits_model())
    batch = plugin.collate_fn(ctx, [{"text": "def f"}, {"text": "x = 1"}])
    assert {name: rows.shape for name, rows in batch.items()} == {"input_ids": (2, 5)}
    assert [text_of(row) for row in batch["input_ids"]] == ["def f", "x = 1"]
    assert plugin.loss_fn(ctx, jnp.zeros((2, 5, 260)), batch, None, False).weight == 8


def test_seq2seq_batches(context):
    plugin = builtin("seq2seq")
    options = {"source": "question", "target": "answer", "prefix": ">", "max_target_length": 4}
    examples = [{"question": "one", "answer": "1"}, {"question": "seventeen", "answer": "00017"}]
    batch = plugin.collate_fn(context("seq2seq", max_length=7, **options), examples)
    assert [text_of(row) for row in batch["input_ids"]] == [">one$__", ">sevent"]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert [text_of(row) for row in batch["labels"]] == ["1$..", "0001"]
    asked = plugin.collate_fn(context("seq2seq", max_length=7, stage="predict", source="question"), [{"question": "q"}])
    assert set(asked) == {"input_ids", "attention_mask"}


def test_seq2seq_scores_targets(context):
    plugin = builtin("seq2seq")
    examples = [{"source": "a", "target": "x y"}, {"source": "b", "target": "z"}, {"source": "c", "target": "w"}]
    metrics = plugin.metric_fn(context("seq2seq"), examples, ["x y", "Z", "w "])
    assert metrics == pytest.approx({"exact_match": 2 / 3, "rouge1": 1, "rouge2": 1 / 3, "rougeL": 1})


def test_dates_are_reproducible_disjoint_and_right(context):
    plugin = builtin("dates")
    options = {"train_examples": 3000, "eval_examples": 300}
    train = plugin.load_examples(context("dates", **options), "train")
    evaluation = plugin.load_examples(context("dates", **options), "eval")
    assert (len(train), len(evaluation)) == (3000, 300)
    assert train == plugin.load_examples(context("dates", **options), "train")
    assert train != plugin.load_examples(context("dates", seed=1, **options), "train")
    assert not {example["target"] for example in train} & {example["target"] for example in evaluation}
    assert max(len(example["source"]) for example in train) < 32
    written = {}
    for example in train + evaluation:
        assert written.setdefault(example["source"].lower(), example["target"]) == example["target"]


@pytest.mark.parametrize(
    ("day", "form", "text"),
    [
        ((2021, 11, 11), "the {day}{th} of {name} {year}", "the 11th of November 2021"),
        ((1962, 5, 23), "{weekday}, {name} {day}, {year}", "Wednesday, May 23, 1962"),
        ((2002, 2, 2), "{short} {day}{th}, {year}", "Feb 2nd, 2002"),
        ((1907, 8, 9), "{day:02}.{month:02}.{year}", "09.08.1907"),
    ],
)
def test_dates_are_written_as_people_do(day, form, text):
    plugin = builtin("dates")
    assert plugin.write(plugin.datetime.date(*day), form) == text


def test_outlines_tell_statements_in_their_order():
    source = (
        'def get(self, key):\n    """Return it."""\n    # why\n\n    kept = self.kept\n    return kept[key]\n'
        "for x in it:\n  try:\n    x += 1\n  finally:\n    x.end()\n"
        "def f(): pass\n"
    )
    assert sorted(builtin("outlines").pieces(source)) == [
        (
            "for x in it:\ntry:\nx += 1\nfinally:\nx.end()\ndef f(): pass",
            "Loops over it, changes x, calls end, defines f.",
        ),
        ("kept = self.kept\nreturn kept[key]", "Sets kept, returns kept."),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a = b = c()", "Sets a."),
        ("x: int = 3", "Sets x."),
        ("assert not done", "Asserts done."),
        ("del d[k]", "Deletes d."),
        ("yield 'text'", "Yields a text."),
        ("await f(x)", "Calls f."),
        ("raise", "Raises it again."),
        ("raise OSError(1)", "Raises OSError."),
        ("with open(f) as g: return [1]", "Enters open, returns a list."),
        ("while a < b: c.d()", "Loops while a, calls d."),
        ("if a: b = 1\nelse: c = 2", "Checks a, sets b and c."),
        ("from a import b, c", "Imports b."),
        ("return", "Returns."),
        ("return lambda: 1", "Returns a value."),
    ],
)
def test_each_statement_is_told_by_a_verb_and_its_object(line, sentence):
    plugin = builtin("outlines")
    (statement,) = ast.parse(f"async def f():\n {line.replace(chr(10), chr(10) + ' ')}").body[0].body
    assert plugin.sentence_of(plugin.deeds_of(statement)) == sentence


def test_outlines_are_disjoint_by_sentence(context, monkeypatch):
    plugin = builtin("outlines")
    monkeypatch.setattr(plugin, "told", lambda: {f"a = {i}\nb = a": f"Sets {i % 90}." for i in range(400)})
    ctx = context("outlines", eval_share=0.3, eval_examples=20)
    train, evaluation = plugin.load_examples(ctx, "train"), plugin.load_examples(ctx, "eval")
    assert len(train) > 100
    assert len(evaluation) == 20
    assert not {one["target"] for one in train} & {one["target"] for one in evaluation}
    assert evaluation == plugin.load_examples(ctx, "eval")


def test_outlines_are_compared_with_what_copying_the_first_line_reaches(context):
    """Of its three words `Sets next_line` has two in `next_line = read()`, of three, in order."""
    example = {"source": "next_line = read()\nx()", "target": "Sets next_line, calls x."}
    found = builtin("outlines").metric_fn(context("outlines"), [example], ["Sets next_line."])
    assert found["first_line_rougeL"] == pytest.approx(2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5))
    assert found["rougeL"] == pytest.approx(2 * 1 * (3 / 5) / (1 + 3 / 5))


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_lines_that_nobody_has_seen_are_summed_up_better_than_by_the_first_of_them(seed, tmp_path):
    values = trained("summaries", tmp_path, [f"seed={seed}"])[-1]
    assert values["rougeL"] >= 2 * values["first_line_rougeL"]
