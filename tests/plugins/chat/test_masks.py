"""What is learned of a conversation: `train_on`, `train: false`, and weights."""

import json

import numpy as np
import pytest

from redco_cli.data.encoded.rows import Rows
from redco_cli.errors import ExampleError
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.plugin.chat.masks import masked, prompt_ids
from redco_cli.plugin.parts import builtin, next_token_loss
from redco_cli.row_notes import noting
from tests.plugins.chat.test_answers import MARKED, NEXT_TURN_ENDS, PLAIN
from tests.plugins.chat.tokenizers import (
    TOOLS,
    assistant,
    calling,
    conversation,
    hf_tokenizer,
    learned,
    marked,
    told,
    user,
)
from tests.plugins.conftest import collate

instruct = builtin("instruct")
CALLS = PLAIN.replace(
    "<e>{% endfor", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<e>{% endfor"
)
THREE = [user("hi"), assistant("a"), user("ho"), assistant("b"), assistant("c"), user("bye")]
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        (
            "all",
            "<|user|>hi<e><|assistant|>[a<e>]<|user|>ho<e><|assistant|>[b<e>]<|assistant|>[c<e>]",
        ),
        ("last", "<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>b<e><|assistant|>[c<e>]"),
        ("completion", "<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>[b<e><|assistant|>c<e>]"),
        (
            "everything",
            "[<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>b<e><|assistant|>c<e><|user|>bye<e>]",
        ),
    ],
)
def test_what_is_learned(template, train_on, expected):
    assert learned(hf_tokenizer(template), THREE, train_on) == expected


@pytest.mark.parametrize(
    ("train_on", "flags", "expected"),
    [
        ("all", {1: False}, "<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>[b<e>]<|assistant|>[c<e>]"),
        (
            "all",
            {1: False, 3: False, 4: False},
            "<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>b<e><|assistant|>c<e>",
        ),
        (
            "all",
            {1: True, 3: False},
            "<|user|>hi<e><|assistant|>[a<e>]<|user|>ho<e><|assistant|>b<e><|assistant|>[c<e>]",
        ),
        ("last", {4: False}, "<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>b<e><|assistant|>c<e>"),
        ("completion", {4: False}, "<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>[b<e><|assistant|>]c<e>"),
        (
            "everything",
            {3: False},
            "[<|user|>hi<e><|assistant|>a<e><|user|>ho<e><|assistant|>]b<e>[<|assistant|>c<e><|user|>bye<e>]",
        ),
    ],
)
def test_a_message_that_is_not_to_be_learned(train_on, flags, expected):
    messages = [{**one, "train": flags[number]} if number in flags else one for number, one in enumerate(THREE)]
    assert learned(hf_tokenizer(PLAIN), messages, train_on) == expected


@pytest.mark.parametrize(("train_on", "weight"), [("completion", 0), ("everything", 0)])
def test_only_answers_are_left_out_of_what_is_learned_together(train_on, weight):
    messages = [user("hi"), calling(), {**told("sun"), "weight": weight}, assistant("b")]
    with pytest.raises(ExampleError, match="message 3, of the tool, is not to be learned, but stands among what is"):
        masked(hf_tokenizer(CALLS), conversation(messages, completion=1), train_on)


@pytest.mark.parametrize(
    ("messages", "completion"),
    [
        ([user("hi"), assistant("of the prompt"), assistant("")], 2),
        ([user("hi"), assistant("a"), user("ho"), assistant("")], None),
    ],
)
def test_an_empty_completion_learns_nothing_of_its_prompt(messages, completion):
    found = masked(hf_tokenizer(PLAIN), conversation(messages, completion=completion), "completion")
    assert not found.weights.any()


def test_an_answer_of_empty_parts_is_none():
    found = masked(hf_tokenizer(PLAIN), conversation([user("hi"), assistant([{"type": "text", "text": ""}])]))
    assert not found.weights.any()


def test_the_completion_of_an_example_is_all_it_renders_to():
    tokenizer, messages = hf_tokenizer(CALLS), [user("hi"), calling("I look."), told("sun"), assistant("b")]
    found = masked(tokenizer, conversation(messages, completion=1), "completion")
    assert marked(tokenizer, found.ids, found.weights) == (
        f"<|user|>hi<e><|assistant|>[I look.{CALL}<e><|tool|>sun<e><|assistant|>b<e>]"
    )
    assert learned(tokenizer, messages, "completion").endswith("sun<e><|assistant|>[b<e>]")
    assert tokenizer.decode(prompt_ids(tokenizer, conversation(messages, completion=1))) == "<|user|>hi<e><|assistant|>"
    assert tokenizer.decode(prompt_ids(tokenizer, conversation(messages))).endswith("<|tool|>sun<e><|assistant|>")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_weights_are_those_of_the_messages(template):
    tokenizer = hf_tokenizer(template)
    messages = [user("hi"), assistant("a", weight=0.5), user("ho"), assistant("b", weight=2), assistant("c")]
    found = masked(tokenizer, conversation(messages), weighted=True)
    text = [tokenizer.decode([token]) for token in found.ids]
    said = {letter: float(found.weights[text.index(letter)]) for letter in "abc"}
    assert said == {"a": 0.5, "b": 2.0, "c": 1.0}
    assert sorted({*found.weights.tolist()}) == [0, 0.5, 1, 2]
    assert found.weights.dtype == np.float32


def test_an_end_that_is_added_has_the_weight_of_its_answer():
    found = masked(hf_tokenizer(NEXT_TURN_ENDS), conversation([user("hi"), assistant("a", weight=3)]), weighted=True)
    assert found.weights.tolist() == [0, 0, 0, 0, 3, 3]
    silent = masked(hf_tokenizer(NEXT_TURN_ENDS), conversation([user("hi"), assistant("a", train=False)]))
    assert silent.weights.tolist() == [0] * 5


def test_weights_need_the_option(context):
    example = {"messages": [user("hi"), assistant("a", weight=0.5)]}
    with pytest.raises(ExampleError) as caught:
        instruct.encode_fn(context("instruct"), example)
    assert str(caught.value) == (
        "collate_fn: message 2 has the weight 0.5\n"
        "  -> set plugin.options.weights: true, with which every token has a weight; or write 0 or 1"
    )
    fields = instruct.encode_fn(context("instruct", weights=True), example)
    assert fields.keys() == {"input_ids", "labels", "weights"}
    text = instruct.encode_fn(context("instruct", weights=True), {"text": "ab"})
    assert text["weights"].tolist() == [1, 1, 1]


def test_weights_reach_the_loss_through_rows_that_texts_share(context, logits_model):
    from redco_cli.data.encoded.store import Collector

    ctx = context("instruct", max_length=64, weights=True)
    examples = [{"messages": [user("q"), assistant("ab", weight=weight)]} for weight in (0.25, 3)]
    encoded = [instruct.encode_fn(ctx, example) for example in examples]
    with Collector("input_ids", None) as collector:
        for row in encoded:
            collector.add({name: np.asarray(field) for name, field in row.items()})
        rows = Rows(collector.finish({}), 64, "truncate", packed=True, ignored=-100)
    assert len(rows) == 1
    batch = instruct.collate_fn(ctx, rows[:])
    assert batch["weights"].dtype == np.float32
    logits = np.random.default_rng(0).normal(size=(1, 64, 260)).astype(np.float32)
    found = next_token_loss(logits, batch["labels"], batch["weights"])
    total = weight = 0.0
    for place in range(63):
        label, share = int(batch["labels"][0, place + 1]), float(batch["weights"][0, place + 1])
        if label != -100:
            row = logits[0, place].astype(np.float64)
            total += share * (np.log(np.exp(row).sum()) - row[label])
            weight += share
    assert weight == 3 * 0.25 + 3 * 3
    assert float(found.sum) == pytest.approx(total, rel=1e-5)
    assert float(found.weight) == weight


def test_a_conversation_that_ends_with_the_user_is_answered_there(context):
    ctx = context("instruct", max_length=80, stage="predict")
    batch = collate(instruct, ctx, [{"messages": [user("hi"), assistant("a"), user("ho")]}])
    tokens = [token for token in batch["input_ids"][0] if token != 256]
    assert ByteTokenizer().decode(tokens, skip_special_tokens=False) == (
        "user: hi<eos>assistant: a<eos>user: ho<eos>assistant: "
    )


def test_only_conversations_with_an_answer_are_compared(context):
    examples = [{"messages": [user("hi"), assistant("a"), user("ho")]}, {"prompt": "hi", "completion": "b"}]
    assert instruct.metric_fn(context("instruct"), examples, ["a", "b"]) == {"exact_match": 1.0}


@pytest.mark.parametrize(
    ("messages", "tools", "note"),
    [
        ([user("hi")], None, "without an answer of the assistant"),
        (
            [user("hi"), assistant(""), assistant("a")],
            None,
            "with an empty turn of the assistant, which carries no loss",
        ),
        ([user("hi"), assistant("a")], TOOLS, "with tools that the chat template leaves out"),
    ],
)
def test_what_is_odd_is_counted(messages, tools, note):
    with noting() as notes:
        masked(hf_tokenizer(PLAIN), conversation(messages, tools))
    assert notes == {note: [0]}


def test_nulls_that_a_file_has_filled_in_are_counted():
    nulls = "with null inside of tools or arguments (as JSON text nothing is filled in)"
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "day": None}}}
    as_text = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}
    for one, expected in ((call, {nulls: [0]}), (as_text, {})):
        with noting() as notes:
            masked(hf_tokenizer(CALLS), conversation([user("hi"), {**assistant(None), "tool_calls": [one]}]))
        assert notes == expected
