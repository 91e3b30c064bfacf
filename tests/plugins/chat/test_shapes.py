"""Shapes of examples: recognised, named, and refused where two fit; and conversations that are none."""

import json
import math

import pytest

from redco_cli.errors import ExampleError
from redco_cli.plugin.chat.shapes import Text, recognise, recognised_shapes
from redco_cli.plugin.parts import builtin
from redco_cli.row_notes import noting
from tests.plugins.chat.test_answers import FORGETS_THOUGHTS, PLAIN
from tests.plugins.chat.tokenizers import TOOLS, assistant, calling, hf_tokenizer, marked, user

instruct, causal_lm = builtin("instruct"), builtin("causal_lm")
TALK = [user("hi"), assistant("yo")]
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
CHAT = "<|user|>hi<e><|assistant|>[yo<e>]"
CALLS = FORGETS_THOUGHTS
CALL = {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'}

SHAPES = {
    "messages": ({"messages": TALK}, "messages in 'messages'", CHAT),
    "messages under another usual name": ({"conversations": TALK}, "messages in 'conversations'", CHAT),
    "keys that a file has filled in": (
        {"messages": [{**one, "name": None, "tool_calls": None, "train": None, "weight": None} for one in TALK]},
        "messages in 'messages'",
        CHAT,
    ),
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, "ShareGPT in 'conversations'", CHAT),
    "ShareGPT in messages": ({"messages": [HUMAN, GPT]}, "ShareGPT in 'messages'", CHAT),
    "ShareGPT with a system turn": (
        {"conversations": [{"from": "system", "value": "S"}, HUMAN, GPT]},
        "ShareGPT in 'conversations'",
        "<|system|>S<e>" + CHAT,
    ),
    "ShareGPT without loss on a turn": (
        {"conversations": [HUMAN, {**GPT, "train": False}]},
        "ShareGPT in 'conversations'",
        "<|user|>hi<e><|assistant|>yo<e>",
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1+1", "output": "2"},
        "Alpaca in 'instruction' and 'output'",
        "<|user|>Add.\n\n1+1<e><|assistant|>[2<e>]",
    ),
    "Alpaca with a null input": (
        {"instruction": "hi", "input": None, "output": "yo"},
        "Alpaca in 'instruction' and 'output'",
        CHAT,
    ),
    "Alpaca with an empty input": (
        {"instruction": "hi", "input": "", "output": "yo"},
        "Alpaca in 'instruction' and 'output'",
        CHAT,
    ),
    "prompt and completion": (
        {"prompt": "hi", "completion": "yo"},
        "prompt and completion in 'prompt' and 'completion'",
        CHAT,
    ),
    "prompt and response": (
        {"prompt": "hi", "response": "yo"},
        "prompt and completion in 'prompt' and 'response'",
        CHAT,
    ),
    "lists of messages": (
        {"prompt": TALK[:1], "completion": TALK[1:]},
        "prompt and completion in 'prompt' and 'completion'",
        CHAT,
    ),
    "messages and a prompt alone": ({"messages": TALK, "prompt": "hi"}, "messages in 'messages'", CHAT),
    "messages that are null beside a prompt": (
        {"messages": None, "prompt": "hi", "response": "yo"},
        "prompt and completion in 'prompt' and 'response'",
        CHAT,
    ),
    "text": ({"text": "hi"}, "text in 'text'", "[hi<e>]"),
    "other columns": ({"messages": TALK, "id": 3, "source": "x"}, "messages in 'messages'", CHAT),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_recognised_and_trains_right(context, name):
    example, shape, expected = SHAPES[name]
    tokenizer = hf_tokenizer(PLAIN)
    with recognised_shapes() as shapes:
        row = instruct.encode_fn(context("instruct", tokenizer=tokenizer), example)
    assert shapes == {shape: 1}
    assert marked(tokenizer, row["input_ids"], [label != -100 for label in row["labels"]]) == expected


def test_sharegpt_calls_tools(context):
    tokenizer = hf_tokenizer("{% if tools %}<|system|>{{ tools | length }}<e>{% endif %}" + CALLS)
    turns = [HUMAN, CALL, {"from": "observation", "value": "sun"}, {"from": "gpt", "value": "A"}]
    example = {"conversations": turns, "tools": json.dumps(TOOLS)}
    row = instruct.encode_fn(context("instruct", tokenizer=tokenizer), example)
    assert marked(tokenizer, row["input_ids"], [label != -100 for label in row["labels"]]) == (
        '<|system|>1<e><|user|>hi<e><|assistant|>[<think></think>{"name": "weather", "arguments": {"city": "Paris"}}'
        "<e>]<|tool|>sun<e><|assistant|>[<think></think>A<e>]"
    )


def test_options_name_columns(context):
    both = {"text": "hi", "messages": TALK, "q": "hi", "a": "yo"}
    read = lambda **options: recognise(both, context("instruct", **options).options)  # noqa: E731
    assert isinstance(read(text="text"), Text)
    assert read(messages="messages").shape == "messages in 'messages'"
    assert read(prompt="q", response="a").shape == "prompt and completion in 'q' and 'a'"
    with pytest.raises(ExampleError) as caught:
        read()
    assert str(caught.value) == (
        "collate_fn: an example fits two shapes: messages in 'messages', and text in 'text'\n"
        "  -> name the column to learn from in plugin.options (messages, prompt, instruction or text)"
    )


def test_a_plugin_of_texts_names_the_one_of_conversations(context):
    ctx = context("causal_lm")
    with pytest.raises(ExampleError) as caught:
        causal_lm.encode_fn(ctx, {"conversations": [HUMAN, GPT]})
    assert str(caught.value) == (
        "collate_fn: an example has no text in 'text', but is a conversation: ShareGPT in 'conversations'\n"
        "  -> set plugin.module: instruct, which learns the answers of conversations"
    )
    assert causal_lm.encode_fn(ctx, {"text": "hi", "messages": TALK})["input_ids"]


def messages(*turns, **columns):
    return {"messages": list(turns), **columns}


CALL_OF = lambda **function: {**assistant(None), "tool_calls": [{"type": "function", "function": function}]}  # noqa: E731
REFUSED = {
    "no columns": ({}, "no columns of a known shape; it has none"),
    "null messages": ({"messages": None}, "no columns of a known shape; it has 'messages' (null)"),
    "no messages": (messages(), "'messages' holds no messages"),
    "text for messages": ({"messages": "hello"}, "'messages' holds 'hello', which is no conversation"),
    "JSON text for messages": ({"messages": json.dumps(TALK)}, "which is no conversation"),
    "columns of a message": ({"messages": {"role": ["user"], "content": ["hi"]}}, "which is no conversation"),
    "messages that are text": (messages("hi", "yo"), "which is no conversation"),
    "a message that is null": (messages(TALK[0], None), "which is no conversation"),
    "a message without content": (messages(TALK[0], {"role": "assistant"}), "which is no conversation"),
    "a message without a role": (messages({"content": "hi"}, TALK[1]), "which is no conversation"),
    "an unknown role": (
        messages(TALK[0], {"role": "bot", "content": "yo"}),
        "message 2 in the column 'messages' has the role 'bot'",
    ),
    "a role that is null": (
        messages({"role": None, "content": "hi"}, TALK[1]),
        "message 1 in the column 'messages' has the role None",
    ),
    "a role that is a list": (messages({"role": ["user"], "content": "hi"}), "has the role ['user']"),
    "null content": (
        messages(TALK[0], assistant(None)),
        "the content of message 2 in the column 'messages' is null or missing",
    ),
    "a number for content": (messages(user(5), TALK[1]), "the content of message 1 in the column 'messages' holds 5"),
    "an image": (messages(user([{"type": "image", "url": "x"}]), TALK[1]), "which is no text"),
    "a call of nothing": (messages(TALK[0], CALL_OF(arguments={})), "a tool call of message 2"),
    "a call that is text": (
        messages(TALK[0], {**assistant(None), "tool_calls": ["weather"]}),
        "a tool call of message 2",
    ),
    "calls that are text": (messages(TALK[0], {**assistant("a"), "tool_calls": "weather()"}), "no list"),
    "arguments that are no JSON": (
        messages(TALK[0], CALL_OF(name="f", arguments="{city")),
        "the arguments of f in message 2 in the column 'messages' is no JSON",
    ),
    "arguments that are a list": (messages(TALK[0], CALL_OF(name="f", arguments=[1])), "no object"),
    "a user who calls a tool": (
        messages({**calling("hi"), "role": "user"}, TALK[1]),
        "has tool_calls, but is of the user",
    ),
    "a call that the template drops": (
        messages(TALK[0], calling("I look.")),
        "the chat template leaves out the tool call of message 2",
    ),
    "tools that are no JSON": (messages(*TALK, tools="[{"), "the column 'tools' is no JSON"),
    "tools that are an object": (messages(*TALK, tools={"name": "f"}), "no list of tools"),
    "a tool without a name": (messages(*TALK, tools=[{"type": "function"}]), "without a name"),
    "train as text": (
        messages(TALK[0], assistant("yo", train="no")),
        "train of message 2 in the column 'messages' is 'no'",
    ),
    "train as a number": (
        messages(TALK[0], assistant("yo", train=0)),
        "train of message 2 in the column 'messages' is 0",
    ),
    "a negative weight": (
        messages(TALK[0], assistant("yo", weight=-1)),
        "the weight of message 2 in the column 'messages' is -1",
    ),
    "a weight that is no number": (messages(TALK[0], assistant("yo", weight=math.nan)), "is nan"),
    "a weight beyond float32": (messages(TALK[0], assistant("yo", weight=1e39)), "is 1e+39"),
    "a weight beyond all floats": (messages(TALK[0], assistant("yo", weight=10**400)), "is 1000"),
    "a weight that would vanish": (messages(TALK[0], assistant("yo", weight=1e-50)), "is 1e-50"),
    "an endless weight": (messages(TALK[0], assistant("yo", weight=math.inf)), "is inf"),
    "a weight as text": (
        messages(TALK[0], assistant("yo", weight="0.5")),
        "holds '0.5', text, but a number is expected",
    ),
    "a weight that is true": (messages(TALK[0], assistant("yo", weight=True)), "holds True"),
    "train and weight": (messages(TALK[0], assistant("yo", weight=0, train=False)), "has both train and weight"),
    "a misspelt weight": (messages(TALK[0], assistant("yo", wieght=0)), "has the key 'wieght', which nothing reads"),
    "another program's weight": (
        messages(TALK[0], assistant("yo", loss=False)),
        "has the key 'loss', which nothing reads",
    ),
    "a user who is to be learned": (messages({**TALK[0], "train": True}, TALK[1]), "only answers carry one"),
    "ShareGPT from no one known": (
        {"conversations": [HUMAN, {"from": "gtp", "value": "yo"}]},
        "message 2 in the column 'conversations' is from 'gtp'",
    ),
    "ShareGPT without a value": (
        {"conversations": [HUMAN, {"from": "gpt"}]},
        "the value of message 2 in the column 'conversations' is null",
    ),
    "ShareGPT with a broken call": ({"conversations": [HUMAN, {**CALL, "value": "weather()"}]}, "is no JSON"),
    "both keys in turn": ({"conversations": [HUMAN, {"author": "gpt", "text": "yo"}]}, "which is no conversation"),
    "Alpaca with a number": ({"instruction": "hi", "input": 3, "output": "yo"}, "the column 'input' holds 3"),
    "an empty list of a prompt": ({"prompt": [], "completion": "yo"}, "'prompt' holds no messages"),
    "a completion of the user": (
        {"prompt": "hi", "completion": TALK},
        "the column 'completion' begins with a message of the user",
    ),
    "a number to complete": ({"prompt": "a", "response": 3}, "the column 'response' holds 3"),
    "two completions": ({"prompt": "hi", "completion": "a", "response": "b"}, "fits two shapes"),
    "Alpaca and its text": (
        {"instruction": "hi", "input": "", "output": "yo", "text": "### hi"},
        "fits two shapes: Alpaca in 'instruction' and 'output', and text in 'text'",
    ),
    "two conversations": ({"messages": TALK, "conversations": [HUMAN, GPT]}, "fits two shapes"),
    "a number for text": ({"text": 3}, "the column 'text' holds 3"),
}
"""Name to an example, and what is said of it."""

ODD = {
    "two answers in a row": (messages(*TALK, assistant("so")), CHAT + "<|assistant|>[so<e>]"),
    "the assistant first": (messages(assistant("ah"), *TALK), "<|assistant|>[ah<e>]" + CHAT),
    "the system only": (messages({"role": "system", "content": "S"}), "<|system|>S<e>"),
    "no answer": (messages(TALK[0]), "<|user|>hi<e>"),
    "a prompt without a completion": ({"prompt": "hi"}, "<|user|>hi<e>"),
    "Alpaca without an output": ({"instruction": "hi", "input": ""}, "<|user|>hi<e>"),
    "an empty answer": (messages(TALK[0], assistant("")), "<|user|>hi<e><|assistant|><e>"),
    "an empty question": (messages(user(""), TALK[1]), "<|user|><e><|assistant|>[yo<e>]"),
    "white space for an answer": (messages(TALK[0], assistant(" \n")), "<|user|>hi<e><|assistant|>[ \n<e>]"),
    "keys that templates may read": (messages(*({**one, "name": "x", "id": 3} for one in TALK)), CHAT),
    "no tools": (messages(*TALK, tools=[]), CHAT),
    "empty text for tools": (messages(*TALK, tools=""), CHAT),
    "no calls": (messages(TALK[0], {**TALK[1], "tool_calls": []}), CHAT),
    "marks of the template in a message": (
        messages(user("<|assistant|>no<e>"), TALK[1]),
        "<|user|><|assistant|>no<e><e><|assistant|>[yo<e>]",
    ),
    "what follows the last answer": (messages(*TALK, user("bye")), CHAT),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_with_its_place_and_a_remedy(context, name):
    example, problem = REFUSED[name]
    ctx = context("instruct", tokenizer=hf_tokenizer(PLAIN))
    with pytest.raises(ExampleError, match="collate_fn: ") as caught:
        instruct.encode_fn(ctx, example)
    (told,) = caught.value.problems
    assert problem in told.problem
    assert told.remedy


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_but_right_trains_right(context, name):
    example, expected = ODD[name]
    tokenizer = hf_tokenizer(PLAIN)
    with noting() as notes:
        row = instruct.encode_fn(context("instruct", tokenizer=tokenizer), example)
    assert marked(tokenizer, row["input_ids"], [label != -100 for label in row["labels"]]) == expected
    assert ("[" in expected) == ("without an answer of the assistant" not in notes)
