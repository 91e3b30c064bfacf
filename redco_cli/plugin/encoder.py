"""A plugin's `encode_fn` as a function of an example alone, which another process can have: it is pickled.

There the plugin is loaded again from its file. The rest of what it is told comes along as it is: tokenizer, options,
models without weights.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from redco_cli.plugin.calls import call_encode
from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.load import LoadedPlugin, load_plugin
from redco_cli.recipe.schema import PluginSection


@dataclass(frozen=True)
class Encoder:
    """`encode_fn` on one example; see `call_encode`.

    Attributes:
        plugin: with an `encode_fn`.
        ctx: what that is told.
        admit: what is done with the tokenizer in another process before it is used: it comes without what this process
            has arranged around it.
    """

    plugin: LoadedPlugin
    ctx: Context
    admit: Callable[[Any], None]

    def __call__(self, example: Example) -> dict[str, np.ndarray[Any, Any]] | None:
        return call_encode(self.plugin, self.ctx, example)

    def __reduce__(self) -> tuple[Callable[..., Encoder], tuple[Any, ...]]:
        section = self.ctx.recipe.plugin
        if section.module.endswith(".py"):
            section = section.model_copy(update={"module": os.path.abspath(self.plugin.file)})
        # Some of it may be of classes of the plugin, which are known only once that is loaded.
        context = pickle.dumps(replace(self.ctx, options=None), pickle.HIGHEST_PROTOCOL)
        return _loaded_again, (section, context, self.admit)


def _loaded_again(section: PluginSection, context: bytes, admit: Callable[[Any], None]) -> Encoder:
    plugin = load_plugin(section, Path.cwd(), str)
    ctx: Context = pickle.loads(context)  # noqa: S301 - of the process that began this one
    admit(ctx.tokenizer)
    return Encoder(plugin, replace(ctx, options=plugin.options), admit)
