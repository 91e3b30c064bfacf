"""Instruction tuning: which tokens carry loss, by marks and by comparison, and what is refused."""

import pytest

from redco_cli.errors import ExampleError, PluginError
from redco_cli.models.config.byte_tokenizer import EOS, PAD, ByteTokenizer
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.parts import builtin
from redco_cli.row_notes import noting
from tests.plugins.chat.tokenizers import hf_tokenizer
from tests.plugins.conftest import collate

instruct = builtin("instruct")

TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
]
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<e>{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
    "{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{% endfor %}" + PROMPT
)


def learned(tokenizer, row):
    """The tokens of a row, those without loss in lower dots: what `redco validate` shows."""
    return "".join(
        "." if label == IGNORED_LABEL else tokenizer.decode([label], skip_special_tokens=False) for label in row
    )


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), hf_tokenizer(PLAIN), hf_tokenizer(MARKED)], ids=["byte", "plain", "marked"]
)
def test_only_the_assistants_turns_and_their_end_are_learned(context, tokenizer):
    end = tokenizer.eos_token
    ctx = context("instruct", max_length=80, tokenizer=tokenizer)
    batch = collate(instruct, ctx, [{"messages": TURNS}])
    said = tokenizer.decode(
        [i for i in batch["input_ids"][0] if i != tokenizer.pad_token_id], skip_special_tokens=False
    )
    assert said.rstrip("<e>").startswith(
        f"system: S{end}user: hi{end}assistant: yo{end}user: 1+1{end}assistant: 2".rstrip("<e>")
    )
    prompt, middle = len("system: S-user: hi-assistant: "), len("user: 1+1-assistant: ")
    assert learned(tokenizer, batch["labels"][0]) == (
        "." * prompt + f"yo{end}" + "." * middle + f"2{end}" + "." * (80 - prompt - 3 - middle - 2)
    )
    assert batch["attention_mask"].sum() == prompt + 3 + middle + 2
    assert {rows.shape for rows in batch.values()} == {(1, 80)}

    last = collate(
        instruct, context("instruct", max_length=80, tokenizer=tokenizer, train_on="last"), [{"messages": TURNS}]
    )
    assert learned(tokenizer, last["labels"][0]).strip(".") == f"2{end}"


def test_prompt_and_response_are_a_conversation_of_two(context):
    ctx = context("instruct", max_length=40, prompt="q", response="a")
    pair = collate(instruct, ctx, [{"q": "1+1", "a": "2"}])
    turns = collate(instruct, ctx, [{"messages": TURNS[3:]}])
    assert all((pair[name] == turns[name]).all() for name in pair)


def test_what_follows_the_last_answer_is_left_out(context):
    ctx = context("instruct", max_length=80)
    batch = collate(instruct, ctx, [{"messages": [*TURNS, {"role": "user", "content": "bye"}]}, {"messages": TURNS}])
    assert (batch["input_ids"][0] == batch["input_ids"][1]).all()


def test_prediction_asks_for_the_last_answer(context):
    ctx = context("instruct", max_length=34, stage="predict")
    batch = collate(instruct, ctx, [{"messages": TURNS[3:]}, {"messages": TURNS[3:4]}, {"prompt": "a" * 50}])
    rows = [ctx.tokenizer.decode([i for i in row if i != PAD], skip_special_tokens=False) for row in batch["input_ids"]]
    assert rows == ["user: 1+1<eos>assistant: "] * 2 + ["a" * 22 + "<eos>assistant: "]
    assert batch["input_ids"][0, 0] == PAD
    assert batch["attention_mask"].sum(1).tolist() == [21, 21, 34]
    assert set(batch) == {"input_ids", "attention_mask"}
    assert EOS not in batch["input_ids"][0, -2:]


def test_the_last_answer_is_the_reference(context):
    examples = [{"messages": TURNS}, {"prompt": "q", "response": "a"}]
    assert instruct.metric_fn(context("instruct"), examples, ["2", "b"]) == {"exact_match": 0.5}


def test_rows_without_an_answer_or_without_loss_are_counted(context):
    examples = [{"prompt": "long" * 5, "response": "a"}, {"prompt": "q"}, {"prompt": "q", "response": "a"}]
    with noting() as notes:
        batch = collate(instruct, context("instruct", max_length=24), examples)
    assert [learned(ByteTokenizer(), row).strip(".") for row in batch["labels"]] == ["", "", "a<eos>"]
    assert notes == {
        "longer than data.max_length 24, and cut": [0],
        "without an answer of the assistant": [1],
        "without a token that carries loss": [0, 1],
    }


def test_a_tokenizer_without_a_template_is_refused(context):
    with pytest.raises(PluginError) as caught:
        collate(instruct, context("instruct", tokenizer=hf_tokenizer(None)), [{"messages": TURNS}])
    assert str(caught.value) == (
        "collate_fn: the tokenizer PreTrainedTokenizerFast has no chat template\n"
        "  -> name an instruction-tuned model's in model.tokenizer, or add a chat_template.jinja to its folder"
    )


@pytest.mark.parametrize("messages", ["hello", [{"role": "user", "text": "hi"}], [None]])
def test_what_is_no_conversation_is_refused(context, messages):
    with pytest.raises(ExampleError) as caught:
        collate(instruct, context("instruct"), [{"messages": messages}])
    assert str(caught.value) == (
        f"collate_fn: 'messages' holds {str(messages)!r}, which is no conversation\n"
        '  -> write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    )


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        (
            {"messages": [*TURNS[:2], {"role": "asistant", "content": "yo"}]},
            "message 3 in the column 'messages' has the role 'asistant', but roles are system, developer, user, "
            "assistant, tool, function\n  -> did you mean assistant? correct the role in the data",
        ),
        (
            {"messages": [{"role": None, "content": "yo"}]},
            "message 1 in the column 'messages' has the role None, but roles are system, developer, user, assistant, "
            "tool, function\n  -> correct the role in the data",
        ),
        ({"messages": []}, "'messages' holds no messages\n  -> write some, or leave the row out"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "the content of message 1 in the column 'messages' holds 5, a number, but text is expected\n"
            "  -> correct that row or leave it out, or name another column in plugin.options",
        ),
        (
            {"prompt": "a", "response": 3},
            "the column 'response' holds 3, a number, but text is expected\n"
            "  -> correct that row or leave it out, or name another column in plugin.options",
        ),
        (
            {"question": "q"},
            "an example has no columns of a known shape; it has 'question'\n"
            "  -> known are messages, conversations (ShareGPT), instruction and output (Alpaca), prompt and "
            "completion, text; rename the columns, or name them in plugin.options",
        ),
    ],
)
def test_what_a_conversation_may_not_hold_is_named(context, example, problem):
    with pytest.raises(ExampleError) as caught:
        collate(instruct, context("instruct"), [example])
    assert str(caught.value) == f"collate_fn: {problem}"


def test_name_tasks_have_one_right_answer_and_disjoint_names(context):
    plugin = builtin("name_tasks")
    answers = {question: answer("find_spec") for question, answer in plugin.TASKS.items()}
    assert list(answers.values()) == ["FIND_SPEC", "FindSpec", "find spec", "find", "spec", "2"]
    ctx = context("name_tasks", eval_examples=200)
    train, evaluation = plugin.load_examples(ctx, "train"), plugin.load_examples(ctx, "eval")
    name = lambda example: next(word for word in example["prompt"].rstrip("?").split() if "_" in word)  # noqa: E731
    assert not set(map(name, train)) & set(map(name, evaluation))
    assert len(evaluation) == 200
    assert evaluation == plugin.load_examples(ctx, "eval")
    assert len(train) > 20_000
