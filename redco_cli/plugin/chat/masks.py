"""Which tokens of a conversation are learned, and with which weight.

    all         every answer of the assistant
    last        its last answer
    completion  all after the prompt: what an example has as such, else all after the last message of someone else
    everything  every token

An answer ends with the end of its turn, which the model has to produce. Where a template writes none, what it writes
next says that the answer is over, and that token is learned; after the last answer it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from redco_cli.plugin.chat.answers import answer_spans, around
from redco_cli.plugin.chat.messages import ASSISTANT, Message, refuse, weight_of
from redco_cli.plugin.chat.shapes import Conversation, is_answer
from redco_cli.plugin.chat.template import Template
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.row_notes import note_rows

TrainOn = Literal["all", "last", "completion", "everything"]


@dataclass(frozen=True)
class Masked:
    """A conversation as tokens, three arrays of one length.

    Attributes:
        ids: int32.
        weights: float32, of each token in the loss; 0 where it carries none.
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]

    @property
    def labels(self) -> NDArray[np.int32]:
        """The ids, `IGNORED_LABEL` where a token carries no loss."""
        return np.where(self.weights > 0, self.ids, np.int32(IGNORED_LABEL))


def prompt_ids(tokenizer: Any, conversation: Conversation) -> list[int]:
    """The tokens before the answer that is to be predicted, with the words that begin it.

    Raises:
        ExampleError, PluginError: the template does not take them.
    """
    template = Template(tokenizer, conversation.tools)
    return template.ids(template.text(conversation.asked, prompt=True))


def masked(tokenizer: Any, conversation: Conversation, train_on: TrainOn = "all", *, weighted: bool = False) -> Masked:
    """The tokens of a conversation, and of each how much it counts in the loss.

    What follows the last answer is left out, unless everything is learned.

    Args:
        tokenizer: with a chat template.
        conversation: of any shape.
        train_on: what is learned.
        weighted: whether messages may have other weights than 0 and 1.

    Raises:
        ExampleError: the template does not take the conversation, answers cannot be found in what it makes, or a
            message has a weight where none may be.
        PluginError: the tokenizer has no chat template.
    """
    template, messages = Template(tokenizer, conversation.tools), conversation.messages
    answers = [number for number, message in enumerate(messages) if is_answer(message)]
    _note(template, messages, answers)
    if not weighted:
        _refuse_weights(messages)
    first = _first_learned(conversation, train_on)
    if train_on != "everything" and answers:
        messages = messages[: answers[-1] + 1]
    whole = template.text(messages)
    ids, place = template.tokens(whole)
    parts = list(_parts(template, messages, answers, first, train_on, whole))
    weights = np.zeros(len(ids) + 1, np.float32)  # one more for an end that the template does not write
    ends = bool(parts) and train_on != "everything" and _has_no_end(template, messages, answers[-1], whole)
    for start, stop, weight in parts:
        weights[place(start) : place(stop) + ends] = weight
    if weights[-1]:
        ids = [*ids, _next_token(template, messages)]
    return Masked(np.array(ids, np.int32), weights[: len(ids)])


def _first_learned(conversation: Conversation, train_on: TrainOn) -> int:
    """The first message of what is learned as a whole."""
    if train_on != "completion":
        return 0
    if conversation.completion is not None:
        return conversation.completion
    roles = [message["role"] for message in conversation.messages]
    while roles and roles[-1] != ASSISTANT:  # nothing answers it
        roles.pop()
    return max((number for number, role in enumerate(roles) if role != ASSISTANT), default=-1) + 1


def _parts(
    template: Template,
    messages: Sequence[Message],
    answers: Sequence[int],
    first: int,
    train_on: TrainOn,
    whole: str,
) -> list[tuple[int, int, float]]:
    """First and last + 1 character of what is learned, with its weight; what comes later in the list counts."""
    if train_on in ("completion", "everything"):
        _refuse_unlearned(messages, first)
    chosen = {number: weight_of(messages[number]) for number in (answers[-1:] if train_on == "last" else answers)}
    if train_on in ("all", "last"):
        chosen = {number: weight for number, weight in chosen.items() if weight}
    elif train_on == "everything":
        chosen = {number: weight for number, weight in chosen.items() if weight != 1}
    else:
        chosen = {number: weight for number, weight in chosen.items() if number >= first}
    spans = answer_spans(template, messages, sorted(chosen))
    parts = [(*part, weight) for weight, found in zip(chosen.values(), spans, strict=True) for part in found]
    if train_on == "everything":
        return [(0, len(whole), 1.0), *parts]
    if train_on == "completion" and parts:
        return [(parts[0][0], parts[-1][1], 1.0), *parts]
    return parts


def _has_no_end(template: Template, messages: Sequence[Message], turn: int, whole: str) -> bool:
    """Whether the template writes nothing after an answer: asked only where the text ends as its last one does."""
    said = messages[turn]["content"]
    if not messages[turn].get("tool_calls") and isinstance(said, str) and not whole.endswith(said.rstrip()[-1:]):
        return False
    return not around(template, [*messages[:turn], {"role": ASSISTANT, "content": said or ""}], turn).right


def _next_token(template: Template, messages: Sequence[Message]) -> int:
    """The token that would follow the last message, an answer."""
    turn = len(messages) - 1
    content = [{"type": "text", "text": "?"}] if isinstance(messages[turn]["content"], list) else "?"
    following: Message = {"role": "tool" if messages[turn].get("tool_calls") else "user", "content": content}
    end = around(template, messages, turn).right
    then = around(template, [*messages, following], turn).right
    ids = template.ids(then[len(end) :])
    if not then.startswith(end) or not ids:
        problem = "the chat template writes nothing by which an answer ends, so that a model would never stop"
        refuse(problem, "let it write an end mark, such as the tokenizer's eos_token")
    return ids[0]


def _note(template: Template, messages: Sequence[Message], answers: Sequence[int]) -> None:
    if not answers:
        note_rows("without an answer of the assistant", [0])
    elif any(message["role"] == ASSISTANT and not is_answer(message) for message in messages):
        note_rows("with an empty turn of the assistant, which carries no loss", [0])
    if template.tools and template.text(messages) == Template(template.tokenizer).text(messages):
        note_rows("with tools that the chat template leaves out", [0])


def _refuse_unlearned(messages: Sequence[Message], first: int) -> None:
    for number, message in enumerate(messages[first:], start=first + 1):
        if message["role"] != ASSISTANT and not weight_of(message):
            problem = f"message {number}, of the {message['role']}, is not to be learned, but stands among what is"
            refuse(problem, "give weights to answers only, or set plugin.options.train_on: all")


def _refuse_weights(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages, start=1):
        if weight_of(message) not in (0, 1):
            problem = f"message {number} has the weight {weight_of(message):g}"
            refuse(problem, "set plugin.options.weights: true, with which every token has a weight; or write 0 or 1")
