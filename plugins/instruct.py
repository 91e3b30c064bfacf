"""Instruction tuning: the model learns the assistant's turns of conversations, and nothing else of them.

An example has `messages`, a list of {role, content}, or a `prompt` and a `response`. The tokenizer's chat template
makes one sequence of it, and only the tokens that the assistant has to produce carry a label: its words and the end
of its turn. They are found by the template's own `{% generation %}` marks, or else by comparing the conversation
with its beginnings.

Several conversations share a row of `data.max_length` tokens where the model can tell them apart (`data.packing`). One
that is longer keeps its beginning (`data.overflow`), in prediction its end. When nothing of an answer is left the
example carries no loss; such examples are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import jax

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.contract import IGNORED_LABEL, Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import (
    check_kind,
    column,
    decode,
    exact_match,
    generate,
    note_rows,
    stack_rows,
    tokenizer_of,
)

Messages = list[dict[str, str]]
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
"""Who may say something."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        messages: the column of conversations; examples without it have the two below.
        prompt: the column of what the user says.
        response: the column of what the assistant answers.
        train_on: learn `all` turns of the assistant, or the `last` only.
    """

    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    train_on: Literal["all", "last"] = "all"


def encode_fn(ctx: Context, example: Example) -> Mapping[str, Any]:
    """The ids of a conversation, with labels on what the assistant says; for prediction those before its answer."""
    tokenizer, messages = tokenizer_of(ctx), messages_of(ctx.options, example)
    if ctx.stage == "predict":
        return {"input_ids": tokenize(tokenizer, asked(messages), prompt=True)}
    if not any(map(is_answer, messages)):
        note_rows("without an answer of the assistant", [0])
    ids, labels = encode_conversation(tokenizer, messages, ctx.options.train_on)
    return {"input_ids": ids, "labels": labels}


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Rows of ids as one batch: fields [B, L], padded."""
    return stack_rows(ctx, examples)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each token of the answers, given everything before it."""
    loss: Loss = ctx.model.next_token_loss(params, **batch, rng=rng, train=train)
    return loss


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """Token ids [B, N] of the answers."""
    return generate(ctx, params, batch, rng)


def output_fn(ctx: Context, outputs: Any) -> Sequence[str]:
    """The answers as text."""
    return decode(ctx.tokenizer, outputs)


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[str]) -> Mapping[str, float]:
    """How many answers equal the last one of their conversation to the letter."""
    answers = [messages_of(ctx.options, example)[-1]["content"] for example in examples]
    return {"exact_match": exact_match(predictions, answers)}


def messages_of(options: Options, example: Example) -> Messages:
    """The conversation of an example, up to and with the assistant's last turn if it has one.

    Raises:
        ExampleError: the columns are missing, or do not hold a conversation.
    """
    if options.messages not in example or (example[options.messages] is None and options.prompt in example):
        if options.prompt not in example:
            column([example], options.messages)  # says which columns there are
        check_kind(example[options.prompt], str, f"the column {options.prompt!r}")
        messages, answer = [{"role": "user", "content": example[options.prompt]}], example.get(options.response)
        if answer is None:
            return messages
        check_kind(answer, str, f"the column {options.response!r}")
        return [*messages, {"role": ASSISTANT, "content": answer}]
    messages = checked_messages(example[options.messages], options.messages)
    turns = [index for index, message in enumerate(messages) if is_answer(message)]
    return messages[: turns[-1] + 1] if turns else messages


def checked_messages(messages: Any, name: str) -> Messages:
    """What the column of conversations holds, when it is one.

    Raises:
        ExampleError: it is none, has no messages, or has one with an unknown role or without text.
    """
    try:
        pairs = [(message["role"], message["content"]) for message in messages]
    except (TypeError, KeyError):
        raise ExampleError(
            "collate_fn",
            f"{name!r} holds {str(messages)[:80]!r}, which is no conversation",
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        ) from None
    if not pairs:
        raise ExampleError("collate_fn", f"{name!r} holds no messages", "write some, or leave the row out")
    for number, (role, content) in enumerate(pairs, start=1):
        where = f"message {number} in the column {name!r}"
        if role not in ROLES:
            close = get_close_matches(str(role), ROLES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            problem = f"{where} has the role {role!r}, but roles are {', '.join(ROLES)}"
            raise ExampleError("collate_fn", problem, f"{hint}correct the role in the data")
        calls = content is None and messages[number - 1].get("tool_calls")
        if not calls and not isinstance(content, list):  # some templates take content in parts
            check_kind(content, str, f"the content of {where}")
    return list(messages)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message is something that the assistant says."""
    return message["role"] == ASSISTANT and bool(message["content"])


def asked(messages: Messages) -> Messages:
    """The conversation before the answer that is to be predicted."""
    return messages[:-1] if messages[-1]["role"] == ASSISTANT else messages


def encode_conversation(tokenizer: Any, messages: Messages, train_on: str) -> tuple[list[int], list[int]]:
    """A conversation that ends with the assistant, as token ids and as labels of the same length.

    Raises:
        PluginError: the tokenizer has no chat template, or its answers cannot be found in what the template makes.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    if train_on == "last":
        turns = turns[-1:]
    ids = tokenize(tokenizer, messages)
    if re.search(r"{%-?\s*generation\s*-?%}", str(tokenizer.chat_template)):
        spans = marked_spans(tokenizer, messages)[-len(turns) :] if turns else []
    else:
        spans = [compared_span(tokenizer, messages, turn, ids) for turn in turns]
    labels = [IGNORED_LABEL] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return ids, labels


def marked_spans(tokenizer: Any, messages: Messages) -> list[tuple[int, int]]:
    """First and last + 1 position of each answer, from the template's `{% generation %}` marks."""
    mask = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    edges = [0, *mask["assistant_masks"], 0]
    starts = [index for index in range(len(edges) - 1) if edges[index + 1] > edges[index]]
    ends = [index for index in range(len(edges) - 1) if edges[index + 1] < edges[index]]
    return list(zip(starts, ends, strict=True))


def compared_span(tokenizer: Any, messages: Messages, turn: int, ids: list[int]) -> tuple[int, int]:
    """First and last + 1 position of the answer `turn`: what the conversation with it has more than that without.

    Tokens are compared after text, since the first of an answer may merge with the prompt: such a token is its first.
    """
    whole, before, upto = (
        render(tokenizer, messages),
        render(tokenizer, messages[:turn], prompt=True),
        render(tokenizer, messages[: turn + 1]),
    )
    if not (whole.startswith(upto) and upto.startswith(before)):
        raise PluginError(
            "collate_fn",
            f"the chat template changes what comes before message {turn + 1} when more follows, so the tokens of the "
            "answer cannot be told apart",
            "set plugin.options.train_on: last, or mark the answers with {% generation %} in the chat template",
        )
    start = common(ids, tokenize(tokenizer, messages[:turn], prompt=True))
    return start, common(ids, tokenize(tokenizer, messages[: turn + 1]))


def common(one: list[int], other: list[int]) -> int:
    """Length of the beginning that two sequences share."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def tokenize(tokenizer: Any, messages: Messages, *, prompt: bool = False) -> list[int]:
    """Token ids that the chat template makes; with `prompt`, also of the words that begin an answer."""
    return list(_apply(tokenizer, messages, add_generation_prompt=prompt, tokenize=True))


def render(tokenizer: Any, messages: Messages, *, prompt: bool = False) -> str:
    """The same as text."""
    return str(_apply(tokenizer, messages, add_generation_prompt=prompt, tokenize=False))


def _apply(tokenizer: Any, messages: Messages, **settings: bool) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise PluginError(
            "collate_fn",
            f"the tokenizer {name} has no chat template",
            "name an instruction-tuned model's in model.tokenizer, or add a chat_template.jinja to its folder",
        )
    return tokenizer.apply_chat_template(messages, **settings)
