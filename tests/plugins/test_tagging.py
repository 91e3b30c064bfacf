"""Classes of words: first pieces, batches and predictions, entities and F1, what is refused; lines of Python."""

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.parts import builtin
from redco_cli.row_notes import noting

tagging, source = builtin("token_classification"), builtin("source_tags")
NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
CLASSES = {"id2label": dict(enumerate(NAMES)), "num_labels": 5}
_ = IGNORED_LABEL


def pieces(specials: bool = True) -> transformers.PreTrainedTokenizerFast:
    """WordPiece, as BERT's: `paris` is `pa ##ris`; what begins with `z` is no piece at all."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "anna", "pa", "##ris", "in", ",", "new", "york"]
    inner = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("z", "")])
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if specials:
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def test_a_word_is_told_by_its_first_piece(context, logits_model):
    ctx = context("token_classification", max_length=9, model=logits_model(**CLASSES), tokenizer=pieces())
    words = ["Anna", "in", "Paris,", "z", "New York"]
    with noting() as notes:
        batch = tagging.collate_fn(ctx, [{"tokens": words, "tags": ["B-PER", 0, "B-LOC", "O", 3]}])
    assert batch["input_ids"].tolist() == [[2, 4, 7, 5, 6, 8, 9, 10, 3]]
    assert batch["tags"].tolist() == [[_, 1, 0, 3, _, _, 3, _, _]]
    assert batch.keys() == {"input_ids", "attention_mask", "token_type_ids", "tags"}
    assert notes == {}


def test_bytes_of_words_are_parted_by_a_space(context, logits_model):
    ctx = context("token_classification", max_length=8, model=logits_model(**CLASSES), tags="ner_tags")
    rows = [{"tokens": ["é", "ab", "c"], "ner_tags": [1, 2, 0]}, {"tokens": ["abc", "defgh"], "ner_tags": [3, 4]}]
    with noting() as notes:
        batch = tagging.collate_fn(ctx, rows)
    assert bytes(batch["input_ids"][0, :7].tolist()) == "é ab c".encode()
    assert batch["tags"].tolist() == [[1, _, _, 2, _, _, 0, _], [3, _, _, _, 4, _, _, _]]
    assert notes == {"longer than data.max_length 8, and cut": [1]}


def test_predictions_are_of_words(context, logits_model):
    ctx = context(
        "token_classification", max_length=6, model=logits_model(**CLASSES), tokenizer=pieces(), stage="predict"
    )
    batch = tagging.collate_fn(ctx, [{"tokens": ["z", "Paris", "in"]}, {"tokens": ["Anna", "in", "in", "in", "in"]}])
    logits = np.zeros((2, 6, 5), np.float32)
    logits[0, 1, 3] = logits[0, 2, 4] = logits[0, 3, 0] = logits[1, 1, 1] = logits[1, 2, 2] = 1
    outputs = tagging.predict_fn(ctx, jnp.array(logits), batch, None)
    assert set(ctx.model.calls[0][1]) == {"input_ids", "attention_mask", "token_type_ids"}
    told = tagging.output_fn(ctx, {name: np.array(array) for name, array in outputs.items()})
    assert told == [[None, "B-LOC", "O"], ["B-PER", "I-PER", "O", "O"]]
    examples = [{"tags": ["O", "B-LOC", "O"]}, {"tags": ["B-PER", "O", "O", "O", "B-LOC"]}]
    assert tagging.metric_fn(ctx, examples, told) == pytest.approx({"precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5})


def test_entities_count_as_a_whole():
    wanted = ["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "O", "B-LOC", "B-LOC", "I-PER"]
    told = ["B-PER", "I-PER", "O", "B-LOC", "O", "O", "B-LOC", "I-LOC", "I-PER"]
    assert tagging.entities(wanted) == {("PER", 0, 2), ("LOC", 3, 5), ("LOC", 6, 7), ("LOC", 7, 8), ("PER", 8, 9)}
    assert tagging.entities(told) == {("PER", 0, 2), ("LOC", 3, 4), ("LOC", 6, 8), ("PER", 8, 9)}
    assert tagging.scores(tagging.entities(told), tagging.entities(wanted)) == pytest.approx(
        {"precision": 2 / 4, "recall": 2 / 5, "f1": 4 / 9}
    )


def test_f1_of_words_is_scikit_learns_without_the_class_o(context, logits_model):
    names = ["O", "name", "call"]
    ctx = context("token_classification", model=logits_model(num_labels=3, id2label={}), classes=names)
    draw = np.random.default_rng(0)
    wanted, told = draw.integers(0, 3, (2, 20, 7))
    found = tagging.metric_fn(
        ctx, [{"tags": row.tolist()} for row in wanted], [[names[i] for i in row] for row in told]
    )
    settings = {"labels": [1, 2], "average": "micro"}
    precision, recall, f1, _ = sklearn.metrics.precision_recall_fscore_support(wanted.ravel(), told.ravel(), **settings)
    assert found == pytest.approx({"precision": precision, "recall": recall, "f1": f1})


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"tokens": ["a", "b"], "tags": ["O"]},
            "an example has 2 words in 'tokens', but 1 in 'tags'\n  -> give each word a class",
        ),
        (
            {"tokens": ["a"], "tags": ["B-ORG"]},
            "the label 'B-ORG' in the column 'tags' is none of the model's classes: O, B-PER, I-PER, B-LOC, I-LOC\n"
            "  -> list every class in model.config.id2label, or correct the data",
        ),
        (
            {"tokens": ["a", 3], "tags": [0, 0]},
            "a word in the column 'tokens' holds 3, a number, but text is expected\n"
            "  -> correct that row or leave it out, or name another column in plugin.options",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(context, logits_model, row, error):
    with pytest.raises(ExampleError) as caught:
        tagging.collate_fn(context("token_classification", model=logits_model(**CLASSES)), [row])
    assert str(caught.value) == f"collate_fn: {error}"


def test_names_of_classes_are_as_many_as_the_model_has(context, logits_model):
    ctx = context("token_classification", model=logits_model(**CLASSES), classes=["O", "B-PER"])
    with pytest.raises(PluginError) as caught:
        tagging.collate_fn(ctx, [{"tokens": ["a"], "tags": [0]}])
    assert str(caught.value) == (
        "plugin.options.classes: names 2 classes, but the model tells 5 apart\n"
        "  -> name each once, or set model.num_labels"
    )


def test_a_tokenizer_that_knows_no_places_is_refused(context, logits_model):
    slow = type("SlowTokenizer", (), {"is_fast": False})()
    with pytest.raises(PluginError, match=r"^model\.tokenizer: SlowTokenizer does not say where in a text its tokens"):
        tagging.collate_fn(
            context("token_classification", model=logits_model(**CLASSES), tokenizer=slow),
            [{"tokens": ["a"], "tags": [0]}],
        )


def test_tags_are_what_the_parser_says():
    lines = (
        "import os\nclass A(B):\n  x: int = f'{y}'\n"
        "  def g(self, *a, k=1):\n    return self.h(\n      q=(k), *a)['s'].t\n"
    )
    assert [" ".join(f"{word}/{tag}" for word, tag in zip(*line, strict=True)) for line in source.tagged(lines)] == [
        "import/keyword os/name",
        "class/keyword A/definition (/O B/name )/O :/O",
        "def/keyword g/definition (/O self/argument ,/O */O a/argument ,/O k/argument =/O 1/number )/O :/O",
        "return/keyword self/name ./O h/call (/O q/argument =/O (/O k/name )/O ,/O */O a/name )/O [/O 's'/string ]/O "
        "./O t/attribute",
    ]


def test_lines_are_disjoint_short_and_reproducible(context, monkeypatch):
    few = {" ".join(words): (words, tags) for words, tags in source.tagged(source.standard_library()["argparse"])}
    monkeypatch.setattr(source, "tagged_lines", lambda: few)
    ctx = context("source_tags", max_length=64, eval_examples=50)
    train, evaluation = source.load_examples(ctx, "train"), source.load_examples(ctx, "eval")
    lines = [" ".join(example["tokens"]) for example in train]
    assert len(set(lines)) == len(lines) > 500
    assert max(map(len, lines)) <= 64
    assert not {*lines} & {" ".join(example["tokens"]) for example in evaluation}
    assert len(evaluation) == 50
    assert evaluation == source.load_examples(ctx, "eval")
