"""A conversation as text and as tokens, by the chat template of a tokenizer.

Where answers stand is worked out on text, and then for tokens: a token that holds the end of what comes before an
answer belongs to the answer.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jinja2 import TemplateError

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.chat.messages import TRAIN, WEIGHT, Message

_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
_RAISED = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template raises on a conversation that it does not take: its own words, or Python's."""


class Template:
    """A chat template with the tools of one conversation.

    Args:
        tokenizer: with a chat template.
        tools: what the assistant may call; None for none.

    Raises:
        PluginError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise PluginError(
                "collate_fn",
                f"the tokenizer {name} has no chat template",
                "name an instruction-tuned model's in model.tokenizer, or add a chat_template.jinja to its folder",
            )
        self.tokenizer, self.tools = tokenizer, None if tools is None else list(tools)
        self._has_text = hasattr(tokenizer, "get_chat_template")  # that of `byte` makes ids without a text of them
        self._forms: tuple[tuple[Callable[[Message], Message], ...], ...] = _FORMS

    @property
    def has_marks(self) -> bool:
        """Whether the template marks what the assistant says by `{% generation %}`."""
        return self._has_text and bool(_MARK.search(self.tokenizer.get_chat_template(tools=self.tools)))

    @property
    def special_tokens(self) -> Collection[str]:
        """The texts that are one token each, whatever stands around them."""
        return self.tokenizer.get_added_vocab().keys() if self._has_text else ()

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """What the template makes of messages; with `prompt`, also the words that begin an answer.

        Raises:
            ExampleError: the template does not take them.
        """
        return self._rendered(messages, prompt, marks=False)[0]

    def marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The same text, and first and last + 1 character of each part in marks, in order."""
        return self._rendered(messages, prompt=False, marks=True)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text that the template made."""
        return self.tokens(text)[0]

    def tokens(self, text: str) -> tuple[list[int], Callable[[int], int]]:
        """The tokens of such a text; and from the number of a character to the first token that ends behind it."""
        if not self._has_text:
            return [ord(letter) for letter in text], lambda place: place
        if getattr(self.tokenizer, "is_fast", False):
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ends = list(itertools.accumulate((end for _, end in found["offset_mapping"]), max))
            return list(found["input_ids"]), lambda place: bisect.bisect_right(ends, place)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids, lambda place: common(ids, self.ids(text[:place]))  # slow ones do not say where tokens end

    def _rendered(self, messages: Sequence[Message], prompt: bool, marks: bool) -> tuple[str, list[tuple[int, int]]]:
        plain, tried, said = [_plain(message) for message in messages], list[list[Message]](), ""
        for form in self._forms:
            given = [functools.reduce(lambda one, change: change(one), form, message) for message in plain]
            if given in tried:
                continue
            tried.append(given)
            try:
                text, places = self._apply(given, prompt, marks)
            except _RAISED as error:
                said = said or str(error) or type(error).__name__
                continue
            if self._writes_none(given, text, prompt):
                said = said or "it writes None for a message that has no content"
                continue
            if all(_is_taken(message["content"], text) for message in given):
                if given != plain:
                    self._forms = (form,)  # of which all renderings are, so that they can be compared
                return text, places
        said = said or "it does not write the text of content that is given in parts"
        problem = f"the chat template does not take this conversation ({_outline(messages)}): {said}"
        raise ExampleError("collate_fn", problem, "correct that row or leave it out")

    def _writes_none(self, given: list[Message], text: str, prompt: bool) -> bool:
        """Whether a message without content, such as a tool call, is written as the word None."""
        if "None" not in text or all(message["content"] is not None for message in given):
            return False
        empty = [{**message, "content": message["content"] or ""} for message in given]
        try:
            return text.count("None") > self._apply(empty, prompt, marks=False)[0].count("None")
        except _RAISED:
            return False

    def _apply(self, given: list[Message], prompt: bool, marks: bool) -> tuple[str, list[tuple[int, int]]]:
        if not self._has_text:
            return "".join(map(chr, self.tokenizer.apply_chat_template(given, add_generation_prompt=prompt))), []
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, places = render_jinja_template(
            conversations=[given],
            tools=self.tools,
            chat_template=self.tokenizer.get_chat_template(tools=self.tools),
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], [(start, stop) for start, stop in (places[0] if marks else ()) if stop > start]


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that two texts, or two lists, share."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _plain(message: Message) -> Message:
    """A message without what is only for the loss."""
    return {key: value for key, value in message.items() if key not in (TRAIN, WEIGHT)}


def _as_text(message: Message) -> Message:
    """With the arguments of its tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [{**one, "arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
    calls = zip(message["tool_calls"], texts, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


def _without_null(message: Message) -> Message:
    """With empty content where it only calls tools."""
    return {**message, "content": ""} if message["content"] is None else message


def _joined(message: Message) -> Message:
    """With content in parts as one text."""
    content = message["content"]
    return message if not isinstance(content, list) else {**message, "content": "".join(map(_text_of, content))}


def _text_of(part: Any) -> str:
    return str(part["text"])


def _is_taken(content: Any, text: str) -> bool:
    """Whether a template writes the text of parts, instead of nothing, or of their list as Python or JSON writes it."""
    if not isinstance(content, list):
        return True
    said = "".join(map(_text_of, content)).rpartition("</think>")[2].strip()
    return said in text and str(content) not in text and json.dumps(content, ensure_ascii=False) not in text


_CHANGES = (_as_text, _without_null, _joined)
_FORMS = tuple(form for size in range(len(_CHANGES) + 1) for form in itertools.combinations(_CHANGES, size))
"""What is changed of messages, until a template takes them: what they take differs from one to the other."""


def _outline(messages: Sequence[Message]) -> str:
    roles = [str(message["role"]) for message in messages]
    return ", ".join(roles if len(roles) <= 6 else [*roles[:3], "...", *roles[-2:]]) or "no messages"
