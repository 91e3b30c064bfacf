"""The shape of an example, recognised by its columns: messages, ShareGPT, Alpaca, prompt and completion, or text.

An example that fits two shapes is refused, unless `plugin.options` names a column of one of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from redco_cli.plugin.chat.messages import ASSISTANT, Message, checked_messages, checked_tools, refuse
from redco_cli.plugin.contract import Example
from redco_cli.plugin.rows import check_kind, column

_heard: ContextVar[Counter[str] | None] = ContextVar("heard", default=None)


@dataclass(frozen=True)
class Columns:
    """Columns as `plugin.options` names them; None for those that are known by their usual name.

    Attributes:
        messages: of conversations: lists of {role, content}, or ShareGPT's {from, value}; by default `messages` or
            `conversations`.
        prompt: of what the user says: text, or messages; by default `prompt`.
        response: of what the assistant answers: text, or messages; by default `completion` or `response`.
        instruction: Alpaca's; its `input` and `output` keep their names.
        text: of texts that are learned as a whole, without a chat template; by default `text`.
        tools: of the tools that a conversation may call; by default `tools`.
    """

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    instruction: str | None = None
    text: str | None = None
    tools: str | None = None


@dataclass(frozen=True)
class Conversation:
    """What an example says, in the form that chat templates take.

    Attributes:
        shape: what it was recognised as, such as `ShareGPT in 'conversations'`.
        messages: at least one.
        tools: those that the assistant may call; None for none.
        completion: number of the first message that is to be produced, where the example itself says so.
    """

    shape: str
    messages: list[Message]
    tools: list[Any] | None = None
    completion: int | None = None

    @property
    def asked(self) -> list[Message]:
        """What comes before the answer that is to be predicted."""
        if self.completion is not None:
            return self.messages[: self.completion]
        return self.messages[:-1] if self.messages[-1]["role"] == ASSISTANT else self.messages

    @property
    def answer(self) -> str | None:
        """What the assistant says there; None where it says nothing."""
        following = self.messages[len(self.asked) :]
        content = following[0]["content"] if following else None
        return content if isinstance(content, str) else None


@dataclass(frozen=True)
class Text:
    """A text that is learned as it stands.

    Attributes:
        shape: what it was recognised as.
        text: all of it.
    """

    shape: str
    text: str


@dataclass(frozen=True)
class _Fit:
    """A shape that an example fits."""

    shape: str
    is_named: bool
    is_complete: bool
    read: Callable[[], Conversation | Text]


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message is something that the assistant says, or a tool that it calls."""
    content = message.get("content")
    said = any(part["text"] for part in content) if isinstance(content, list) else bool(content)
    return message["role"] == ASSISTANT and (said or bool(message.get("tool_calls")))


@contextlib.contextmanager
def recognised_shapes() -> Iterator[Counter[str]]:
    """Counts the shapes of the examples that are recognised within, in this thread."""
    counts = Counter[str]()
    token = _heard.set(counts)
    try:
        yield counts
    finally:
        _heard.reset(token)


def recognise(example: Example, columns: Columns) -> Conversation | Text:
    """What an example says.

    Args:
        example: any.
        columns: those that the recipe names.

    Raises:
        ExampleError: it is of no known shape, or of two, or its columns do not hold what they should.
    """
    fits = list(_fits(example, columns))
    found = [fit for fit in fits if fit.is_complete] or fits  # a prompt alone is for prediction
    found = [fit for fit in found if fit.is_named] or found
    if len(found) > 1:
        problem = f"an example fits two shapes: {found[0].shape}, and {found[1].shape}"
        refuse(problem, "name the column to learn from in plugin.options (messages, prompt, instruction or text)")
    if not found:
        names = [getattr(columns, field.name) for field in fields(Columns)]
        named = [name for name in names if name is not None and name not in example]
        has = (
            ", ".join(f"{name!r}{' (null)' if example[name] is None else ''}" for name in sorted(map(str, example)))
            or "none"
        )
        problem = f"no column {named[0]!r}" if named else "no columns of a known shape"
        remedy = (
            "known are messages, conversations (ShareGPT), instruction and output (Alpaca), prompt and completion, "
            "text; rename the columns, or name them in plugin.options"
        )
        refuse(f"an example has {problem}; it has {has}", remedy)
    counts = _heard.get()
    if counts is not None:
        counts[found[0].shape] += 1
    return found[0].read()


def refuse_conversation(example: Example, name: str) -> None:
    """Refuses an example that has no column of texts but a conversation, for a plugin that reads texts only.

    Args:
        example: any.
        name: of the column that the plugin reads.

    Raises:
        ExampleError: naming the plugin that reads it.
    """
    fits = [] if example.get(name) is not None else [fit.shape for fit in _fits(example, Columns()) if fit.is_complete]
    if fits:
        remedy = "set plugin.module: instruct, which learns the answers of conversations"
        refuse(f"an example has no text in {name!r}, but is a conversation: {fits[0]}", remedy)


def _fits(example: Example, columns: Columns) -> Iterator[_Fit]:
    def has(name: str) -> bool:
        return example.get(name) is not None

    tools = columns.tools or "tools"
    for name in (columns.messages,) if columns.messages else ("messages", "conversations"):
        if has(name):
            shape = f"{'ShareGPT' if _is_sharegpt(example[name]) else 'messages'} in {name!r}"
            yield _Fit(shape, bool(columns.messages), True, partial(_read_messages, shape, example, name, tools))
    name = columns.instruction or "instruction"
    if has(name):
        shape = f"Alpaca in {name!r} and 'output'"
        yield _Fit(shape, bool(columns.instruction), has("output"), partial(_read_alpaca, shape, example, name))
    name = columns.prompt or "prompt"
    if has(name):
        is_named = bool(columns.prompt or columns.response)
        answers = [one for one in ([columns.response] if columns.response else ["completion", "response"]) if has(one)]
        for answer in answers:
            shape = f"prompt and completion in {name!r} and {answer!r}"
            yield _Fit(shape, is_named, True, partial(_read_sides, shape, example, name, answer, tools))
        if not answers:
            shape = f"a prompt in {name!r}"
            yield _Fit(shape, is_named, False, partial(_read_sides, shape, example, name, None, tools))
    name = columns.text or "text"
    if has(name):
        shape = f"text in {name!r}"
        yield _Fit(shape, bool(columns.text), True, partial(_read_text, shape, example, name))


def _is_sharegpt(messages: Any) -> bool:
    first = messages[0] if isinstance(messages, list | tuple) and messages else None
    return isinstance(first, Mapping) and "from" in first and first.get("role") is None


def _read_messages(shape: str, example: Example, name: str, tools: str) -> Conversation:
    return Conversation(shape, checked_messages(example[name], name), checked_tools(example.get(tools), tools))


def _read_alpaca(shape: str, example: Example, name: str) -> Conversation:
    parts = [example[name], example.get("input"), example.get("output")]
    for key, value in zip((name, "input", "output"), parts, strict=True):
        if value is not None:
            check_kind(value, str, f"the column {key!r}")
    instruction, given, output = parts
    messages: list[Message] = [{"role": "user", "content": "\n\n".join(filter(None, [instruction, given]))}]
    return _prompted(shape, messages, [] if output is None else [{"role": ASSISTANT, "content": output}], None)


def _read_sides(shape: str, example: Example, prompt: str, answer: str | None, tools: str) -> Conversation:
    asked = _side(example[prompt], prompt, "user")
    answered = [] if answer is None else _side(example[answer], answer, ASSISTANT)
    if answered and answered[0]["role"] != ASSISTANT:
        problem = f"the column {answer!r} begins with a message of the {answered[0]['role']}"
        refuse(problem, "let the assistant begin it; what comes before belongs to the prompt")
    return _prompted(shape, asked, answered, checked_tools(example.get(tools), tools))


def _side(value: Any, name: str, role: str) -> list[Message]:
    if isinstance(value, list | tuple):
        return checked_messages(value, name)
    check_kind(value, str, f"the column {name!r}")
    return [{"role": role, "content": value}]


def _prompted(shape: str, asked: list[Message], answered: list[Message], tools: list[Any] | None) -> Conversation:
    return Conversation(shape, [*asked, *answered], tools, len(asked) if answered else None)


def _read_text(shape: str, example: Example, name: str) -> Text:
    return Text(shape, str(column([example], name, str)[0]))
