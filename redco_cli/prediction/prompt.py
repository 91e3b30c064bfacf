"""One text as an example of a plugin: `redco predict --prompt TEXT`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from redco_cli.errors import DataError, PluginError, UsageError
from redco_cli.plugin.contract import Example
from redco_cli.plugin.load import LoadedPlugin

OPTIONS = ("prompt", "source", "text")
"""Options that name the column a plugin reads its input from, as the built-in plugins call them; the first counts."""
COLUMN = "prompt"
"""The column of a plugin without such an option."""


def prompt_example(text: str) -> Callable[[LoadedPlugin], list[Example]]:
    """Makes the example of a plugin whose input is this text."""

    def make(plugin: LoadedPlugin) -> list[Example]:
        options = plugin.options
        given = options if isinstance(options, Mapping) else vars(options)
        named = [given[name] for name in OPTIONS if isinstance(given.get(name), str)]
        return [{(named or [COLUMN])[0]: text}]

    return make


@contextmanager
def explaining_prompt() -> Iterator[None]:
    """Tells the error of a plugin that cannot make a batch of one text as one of `--prompt`.

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
        problem = f"the plugin does not predict from a text alone: {place}{found.problem}"
        remedy = "give whole examples: --input FILE, or JSON lines to --input -"
        raise UsageError("--prompt", problem, remedy) from error
