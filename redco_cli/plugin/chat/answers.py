"""Where the answers of the assistant stand in a rendered conversation.

By the template's own `{% generation %}` marks where it has them. Else by comparison: an answer is what a conversation
with it has more than its beginning with the words that ask for it. Of the first of

    user: hi <e> assistant: yo <e> user: 1+1 <e> assistant: 2 <e>

the beginning is `user: hi <e> assistant: `, and with it `user: hi <e> assistant: yo <e>`; so it is `yo <e>`.

Templates that make something else of a turn when more follows, or ask with words that they do not write before an
answer, are probed: a word that is nowhere else takes the place of what one message says, and what the template writes
before and after that word is the same as around the message itself. What cannot be found so is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from redco_cli.errors import ExampleError
from redco_cli.plugin.chat.messages import ASSISTANT, Message
from redco_cli.plugin.chat.template import Template, common

Span = tuple[int, int]
"""First and last + 1 character."""
_MARK_THEM = "mark the answers with {% generation %} in the chat template, or learn the last one only (train_on: last)"
_AS_PARTS = ' (some take content only as [{"type": "text", "text": "..."}])'


class Around(NamedTuple):
    """What a template writes before and after what one message says."""

    left: str
    right: str


def answer_spans(template: Template, messages: Sequence[Message], turns: Sequence[int]) -> list[list[Span]]:
    """Where answers stand in the text of a conversation: all that the assistant has to write, the end of turn included.

    Args:
        template: with the tools of the conversation.
        messages: all of it.
        turns: numbers of messages of the assistant, in order.

    Returns:
        For each turn its parts; more than one only where the template marks several.

    Raises:
        ExampleError: the template does not take the conversation, or an answer cannot be found for certain.
    """
    if not turns:
        return []
    if template.has_marks:
        found = _marked(template, messages, turns)
    else:
        whole = template.text(messages)
        found = [[_compared(template, messages, turn, whole)] for turn in turns]
    edges = [edge for parts in found for part in parts for edge in part]
    if edges != sorted(edges):
        _refuse(turns[0], "stands in the text of another message", _MARK_THEM)
    return found


def around(template: Template, messages: Sequence[Message], number: int, *, prompt: bool = False) -> Around:
    """What the template writes before and after what the message `number` says.

    Args:
        template: with the tools of the conversation.
        messages: all of it.
        number: of the message, from 0.
        prompt: whether the conversation ends with the words that begin an answer.

    Raises:
        ExampleError: the template leaves out what the message says, or repeats it.
    """
    plain = str(messages) + str(template.tools)
    word = next(word for word in (f"Qx{count}vz" for count in itertools.count(7)) if word not in plain)
    text = template.text([*messages[:number], _saying(messages[number], word), *messages[number + 1 :]], prompt=prompt)
    if text.count(word) != 1:
        done = "repeats" if word in text else "leaves out"
        what = "the tool call" if messages[number].get("tool_calls") else "the content"
        problem = f"the chat template {done} {what} of message {number + 1}, so that answers cannot be told apart"
        raise ExampleError("collate_fn", problem, "leave such rows out, or correct the chat template" + _AS_PARTS)
    left, _, right = text.partition(word)
    return Around(left, right)


def _saying(message: Message, word: str) -> Message:
    """The message with a word in the place of what it says; where it calls tools, in the last call."""
    calls = message.get("tool_calls")
    if calls:
        last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"word": word}}}
        return {**message, "tool_calls": [*calls[:-1], last]}
    is_text = isinstance(message["content"], str | None)
    return {**message, "content": word if is_text else [{"type": "text", "text": word}]}


def _compared(template: Template, messages: Sequence[Message], turn: int, whole: str) -> Span:
    upto = template.text(messages[: turn + 1])
    before = _before(template, messages, turn)
    if whole.startswith(upto) and upto.startswith(before) and _holds(messages[turn], upto[len(before) :]):
        return len(before), len(upto)
    inside, last = around(template, messages, turn), around(template, messages[: turn + 1], turn)
    end = _end(template, last.right, inside.right)
    if end is None or not whole.endswith(inside.right[end:]):
        _refuse(turn, "ends in another way when more follows", _MARK_THEM)
    stop = len(whole) - len(inside.right) + end
    start = len(before)
    if not whole.startswith(before):
        said = common(whole, inside.left)
        start = min(_after_cue(template, messages, turn, whole), said)
    if not start < stop or not _holds(messages[turn], whole[start:stop], calls_only=True):
        _refuse(turn, "is left out by the chat template", _MARK_THEM)
    return start, stop


def _before(template: Template, messages: Sequence[Message], turn: int) -> str:
    try:
        return template.text(messages[:turn], prompt=True)
    except ExampleError:
        if turn:
            raise
        _refuse_first()


def _end(template: Template, alone: str, followed: str) -> int | None:
    """How many characters end a turn that is followed by others, by how it ends when it is the last.

    Both are what comes after its content. At the very end there may be an eos token more, or one special token in the
    place of another; None where they differ otherwise.
    """
    if followed.startswith(alone):
        return len(alone)
    if alone in template.special_tokens:  # before an eos token is taken away: one end may stand for another
        other = max((len(token) for token in template.special_tokens if followed.startswith(token)), default=None)
        if other is not None:
            return other
    bare = alone.removesuffix(getattr(template.tokenizer, "eos_token", None) or "")
    return len(bare) if followed.startswith(bare) else None


def _after_cue(template: Template, messages: Sequence[Message], turn: int, whole: str) -> int:
    """Where the words end that ask for an answer, as far as the conversation has them before it.

    What follows the message before it is compared with what follows when an answer is asked for.
    """
    if turn == 0:
        _refuse_first()
    given = around(template, messages, turn - 1).right
    asked = around(template, messages[:turn], turn - 1, prompt=True).right
    ended = around(template, messages[:turn], turn - 1).right
    shared, end = common(given, asked), _end(template, ended, asked)
    if end is None or shared < end or not whole.endswith(given[shared:]):
        _refuse(turn, "follows on a text that is another one when more follows", _MARK_THEM)
    return len(whole) - len(given) + shared


def _holds(message: Message, text: str, *, calls_only: bool = False) -> bool:
    """Whether a text has the names of all tools that a message calls, and what it says."""
    content = message["content"] or ""
    said = content if isinstance(content, str) else "".join(part["text"] for part in content)
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return all(name in text for name in names) and (calls_only or said.strip() in text)


def _marked(template: Template, messages: Sequence[Message], turns: Sequence[int]) -> list[list[Span]]:
    whole, marks = template.marked(messages)
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if len(marks) == len(answers):
        one_each = dict(zip(answers, marks, strict=True))
        if all(_holds(messages[turn], whole[slice(*one_each[turn])]) for turn in turns):
            return [[one_each[turn]] for turn in turns]
    found = []
    for turn in turns:
        first = len(template.marked(messages[:turn])[1]) if turn else 0
        parts = marks[first : len(template.marked(messages[: turn + 1])[1])]
        if not parts:
            _refuse(turn, "has no {% generation %} mark", "correct the marks in the chat template")
        found.append(parts)
    return found


def _refuse_first() -> NoReturn:
    problem = "the assistant begins, and the chat template has no words that ask for an answer to nothing"
    raise ExampleError("collate_fn", problem, "leave the message out, or give it train: false")


def _refuse(turn: int, problem: str, remedy: str) -> NoReturn:
    where = f"the answer in message {turn + 1} {problem}"
    raise ExampleError("collate_fn", f"{where}: its tokens cannot be told", remedy)
