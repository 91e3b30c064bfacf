"""One text, or a conversation, as an example of a plugin: `redco predict --prompt TEXT` and `--chat`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redco_cli.errors import DataError, PluginError, UsageError
from redco_cli.plugin.contract import Example
from redco_cli.plugin.load import LoadedPlugin

OPTIONS = ("prompt", "source", "text")
"""Options that name the column a plugin reads its input from, as the built-in plugins call them; the first counts."""
COLUMN = "prompt"
"""The column of a plugin without such an option."""
CONVERSATION = "messages"
"""The option that names the column of conversations, and that column where there is no such option."""
Made = Callable[[LoadedPlugin], list[Example]]


def prompt_example(text: str) -> Made:
    """Makes the example of a plugin whose input is this text."""
    return lambda plugin: [{_column(plugin, OPTIONS, COLUMN): text}]


def conversation_example(messages: Sequence[Mapping[str, str]]) -> Made:
    """Makes the example of a plugin whose input is a conversation: `role` and `content` of each turn."""
    return lambda plugin: [{_column(plugin, (CONVERSATION,), CONVERSATION): list(messages)}]


def answer_text(prediction: Any) -> str:
    """The text of a prediction, as the next turn of a conversation reads it.

    Raises:
        UsageError: there are several samples of it.
    """
    if isinstance(prediction, list):
        problem = "a conversation goes on from one answer, but predict.generation.num_samples makes several"
        raise UsageError("--chat", problem, "add predict.generation.num_samples=1")
    return str(prediction["text"] if isinstance(prediction, Mapping) and "text" in prediction else prediction)


def _column(plugin: LoadedPlugin, options: Sequence[str], otherwise: str) -> str:
    given = plugin.options if isinstance(plugin.options, Mapping) else vars(plugin.options)
    named: list[str] = [given[name] for name in options if isinstance(given.get(name), str)]
    return (named or [otherwise])[0]


@contextmanager
def explaining_prompt(option: str = "--prompt", what: str = "a text alone") -> Iterator[None]:
    """Tells the error of a plugin that cannot make a batch of one text, or of a conversation, as one of that option.

    Raises:
        UsageError: it cannot.
    """
    try:
        yield
    except (PluginError, DataError) as error:
        found = error.problems[0]
        if isinstance(error, PluginError) and "collate_fn" not in f"{found.where} {found.problem}":
            raise
        place = f"{found.where}: " if isinstance(error, PluginError) else ""  # the one example needs none
        problem = f"the plugin does not predict from {what}: {place}{found.problem}"
        remedy = "give whole examples: --input FILE, or JSON lines to --input -"
        raise UsageError(option, problem, remedy) from error
