"""The examples of a split, from the recipe or the plugin, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redco_cli.console import warn
from redco_cli.data.examples import check_examples, is_indexed
from redco_cli.data.resumable import ResumableStream, is_resumable
from redco_cli.data.source import load_source
from redco_cli.data.stream import is_seekable
from redco_cli.errors import DataError, PluginError
from redco_cli.plugin.contract import Context, Stage
from redco_cli.plugin.examples import guard_examples, reading
from redco_cli.plugin.guard import guarded
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.data import SourceSection
from redco_cli.recipe.load import LoadedRecipe


def find_examples(loaded: LoadedRecipe, plugin: LoadedPlugin, ctx: Context, split: str) -> Any:
    """The examples of a split from the recipe, else from the plugin, else None.

    Args:
        loaded: the recipe.
        plugin: with or without `load_examples`.
        ctx: what that is told, for the stage of the split.
        split: `train` or `eval`.

    Raises:
        DataError, PluginError: the data cannot be read.
    """
    key = f"data.{split}"
    source: SourceSection | None = getattr(loaded.recipe.data, split)
    if source is not None:
        streaming = loaded.recipe.data.streaming and split == "train"
        tell, directory = _warner(loaded.where(key)), loaded.directory
        return load_source(source, key, streaming=streaming, directory=directory, where=loaded.where, tell=tell)
    if plugin.load_examples is None:
        return None
    where = f"{plugin.file}: load_examples"
    with guarded(where, f"load_examples(ctx, {split!r})", plugin.file):
        examples = plugin.load_examples(ctx, split)
        if examples is None:
            return None
        examples = check_examples(examples, where)
        if not is_indexed(examples) and is_resumable(examples):
            examples = ResumableStream(examples, lambda: reading(plugin.file), _warner(where))
    if split == "eval" and not is_indexed(examples):
        problem = "the eval examples have no length, and each must be evaluated exactly once"
        raise PluginError(where, problem, "return a list of dicts, or an object with __len__ and __getitem__")
    return examples if is_seekable(examples) else guard_examples(examples, plugin.file)


def _warner(where: str) -> Callable[[str], None]:
    """Warns of something at a place."""
    return lambda text: warn(f"{where}: {text}")


def refuse_without_eval(loaded: LoadedRecipe, stages: Sequence[Stage]) -> None:
    """Refuses a job that asks for what only eval examples can give."""
    if "train" not in stages:
        if "eval" in stages:
            remedy = "give data.eval.path and data.eval.data_files, or let load_examples(ctx, 'eval') return examples"
            raise DataError(loaded.where("data.eval"), "there is nothing to evaluate", remedy)
        raise DataError(loaded.where("data.eval"), "there is nothing to predict", "give --input FILE, or add data.eval")
    section = loaded.recipe.eval
    asked = [key for key in ("every", "at_start", "predict", "patience") if getattr(section, key)]
    if asked:
        remedy = "add data.eval, or let load_examples(ctx, 'eval') return examples"
        raise DataError(loaded.where(f"eval.{asked[0]}"), "there is no eval data", remedy)


def refuse_without_train(loaded: LoadedRecipe, plugin: LoadedPlugin) -> None:
    """Refuses a job that is to train on nothing.

    Raises:
        DataError: always.
    """
    found = "" if plugin.load_examples is None else "; load_examples(ctx, 'train') returned None"
    remedy = "add data.train, or let load_examples(ctx, 'train') of the plugin return examples"
    raise DataError(loaded.where("data.train"), f"there is no training data{found}", remedy)
