"""The examples of a split, from the recipe or the plugin, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redco_cli.console import note, warn
from redco_cli.data.examples import check_examples, is_indexed
from redco_cli.data.mixed.streams import MixedStream, Source
from redco_cli.data.mixture import Mixture, Part
from redco_cli.data.resumable import ResumableStream, is_resumable
from redco_cli.data.source import load_source
from redco_cli.data.stream import is_seekable
from redco_cli.errors import DataError, PluginError, RecipeError
from redco_cli.plugin.contract import Context, Stage
from redco_cli.plugin.examples import guard_examples, reading
from redco_cli.plugin.guard import guarded
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.data import SourceSection
from redco_cli.recipe.explain import did_you_mean
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.recipe.schema import Recipe


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """What training a recipe goes through."""
    return ("train", "eval", "predict") if recipe.eval.predict else ("train", "eval")


def find_examples(loaded: LoadedRecipe, plugin: LoadedPlugin, ctx: Context, split: str, train: Any = None) -> Any:
    """The examples of a split from the recipe, else from the plugin, else None.

    Args:
        loaded: the recipe.
        plugin: with or without `load_examples`.
        ctx: what that is told, for the stage of the split.
        split: `train` or `eval`.
        train: the training examples, where they were found before: some of them may be the eval examples.

    Raises:
        DataError, PluginError: the data cannot be read.
    """
    data = loaded.recipe.data
    if split == "eval" and data.held_out is not None:
        found = find_examples(loaded, plugin, replace(ctx, stage="train"), "train") if train is None else train
        return None if found is None else found.held_out
    sources = data.sources(split)
    if sources:
        wholes = {key: _from_source(loaded, key, source, split) for key, source in sources.items()}
    else:
        own = _from_plugin(loaded, plugin, ctx, split)
        wholes = {} if own is None else {f"data.{split}": own}
    if split == "train" and data.held_out is not None:
        return _without_eval(loaded, plugin, wholes) if wholes else None
    if len(wholes) == 1 and not isinstance(getattr(data, split), tuple):
        return next(iter(wholes.values()))
    if wholes and not all(is_indexed(one) for one in wholes.values()):
        return _mixed(loaded, wholes)
    return Mixture([_weighed(loaded, key, Part.whole(one)) for key, one in wholes.items()]) if wholes else None


def _from_source(loaded: LoadedRecipe, key: str, source: SourceSection, split: str) -> Any:
    streaming = loaded.recipe.data.streaming and split == "train"
    tell, directory = _warner(loaded.where(key)), loaded.directory
    return load_source(source, key, streaming=streaming, directory=directory, where=loaded.where, tell=tell)


def _from_plugin(loaded: LoadedRecipe, plugin: LoadedPlugin, ctx: Context, split: str) -> Any:
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


def _without_eval(loaded: LoadedRecipe, plugin: LoadedPlugin, wholes: Mapping[str, Any]) -> Mixture:
    """The training examples without those that are held out for evaluation, which go along."""
    wanted, kept, held = loaded.recipe.data.held_out, [], []
    assert wanted is not None
    for key, examples in wholes.items():
        if not is_indexed(examples):
            problem = f"{loaded.recipe.data.eval} given, but the examples that load_examples of {plugin.file} returns "
            remedy = "let load_examples(ctx, 'eval') return the eval examples, or give data.eval a dataset of its own"
            raise DataError(loaded.where("data.eval"), f"{problem}have no length", remedy)
        rest, out = Part.whole(examples).split(wanted)
        if not len(rest.numbers):
            problem = f"{loaded.recipe.data.eval} given, but {key} has {len(examples)} in all"
            raise DataError(loaded.where("data.eval"), f"{problem}: none is left to train on", "hold out fewer")
        kept.append(_weighed(loaded, key, rest))
        held.append(out)
    return Mixture(kept, Mixture(held))


def _mixed(loaded: LoadedRecipe, wholes: Mapping[str, Any]) -> MixedStream:
    """Several streams as one."""
    sections = loaded.recipe.data.sources("train")
    sources = [
        Source(one, getattr(sections[key], "weight", 1.0), one.expected(), loaded.where(key))
        for key, one in wholes.items()
    ]
    mixed = MixedStream(sources, in_turn=not loaded.recipe.data.shuffle)
    if not mixed.is_spread:
        unknown = ", ".join(key for key, source in zip(wholes, sources, strict=True) if source.expected is None)
        note(
            f"{loaded.where('data.train')}: nobody knows how long {unknown} is, so that examples come in proportion to "
            "the weights alone, and at the end of an epoch those of the longest"
        )
    return mixed


def _weighed(loaded: LoadedRecipe, key: str, part: Part) -> Part:
    weight = getattr(loaded.recipe.data.sources("train").get(key), "weight", 1.0)
    weighed = part.weighed(weight)
    if not len(weighed.numbers):
        problem = f"{weight} of {len(part.numbers)} examples is none"
        raise DataError(loaded.where(f"{key}.weight"), problem, "give a larger weight, or leave the dataset out")
    return weighed


def _warner(where: str) -> Callable[[str], None]:
    """Warns of something at a place."""
    return lambda text: warn(f"{where}: {text}")


def refuse_best_metric(loaded: LoadedRecipe, plugin: LoadedPlugin, known: Sequence[str]) -> None:
    """Refuses an `eval.best_metric` that no evaluation will give.

    What `metric_fn` returns, or `run_fn` logs, is known only when it has run; else what `loss_fn` gives is meant.

    Args:
        loaded: the recipe.
        plugin: its functions.
        known: what `loss_fn` gives.

    Raises:
        RecipeError: naming what there is.
    """
    section, has_more = loaded.recipe.eval, plugin.metric_fn is not None
    if section.best_metric in known or (has_more and section.predict) or plugin.run_fn is not None:
        return
    problem, meant = f"evaluation gives no {section.best_metric}", did_you_mean(section.best_metric, known)
    if meant.startswith("known"):
        remedy = f"it gives {', '.join(known)}{'; for those of metric_fn set eval.predict: true' if has_more else ''}"
    else:
        remedy = f"{meant}{' Those of metric_fn need eval.predict: true' if has_more else ''}"
    raise RecipeError(loaded.where("eval.best_metric"), problem, remedy)


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


def refuse_untrainable(loaded: LoadedRecipe, plugin: LoadedPlugin, examples: Any) -> None:
    """Refuses a job that is to train on nothing, or until its patience ends where an outer loop decides that.

    Args:
        loaded: the recipe.
        plugin: with or without `load_examples`.
        examples: to train on; None where there are none.

    Raises:
        RecipeError: `eval.patience` is given beside a `run_fn`.
        DataError: there are no examples.
    """
    if plugin.run_fn is not None and loaded.recipe.eval.patience is not None:
        problem = f"{plugin.file} has a run_fn, which alone decides when its run ends"
        remedy = "leave it out, and let run_fn compare what run.evaluate() returns"
        raise RecipeError(loaded.where("eval.patience"), problem, remedy)
    if examples is None:
        found = "" if plugin.load_examples is None else "; load_examples(ctx, 'train') returned None"
        remedy = "add data.train, or let load_examples(ctx, 'train') of the plugin return examples"
        raise DataError(loaded.where("data.train"), f"there is no training data{found}", remedy)
