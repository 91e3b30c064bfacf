"""The adapter that `adapter.from` names: what its files say of it, which a recipe need not say again.

It is a directory of PEFT's files or of diffusers', of which every weight is named by its whole path, or a run, of which
the section of its own recipe counts. Values are read when a run begins with them; from its first checkpoint on, nothing
is read here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
from pydantic import ValidationError

from redco_cli.adapters.diffusers import FILE
from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.model import Adapter, adapter_of
from redco_cli.adapters.peft import read_peft
from redco_cli.adapters.stored import CONFIG, config_file
from redco_cli.errors import ModelError, RecipeError, StorageError
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import find_params
from redco_cli.recipe.sections.adapter import TAKEN, AdapterSection

_IN_PEFT = {
    "type": "use_dora",
    "rank": "r",
    "alpha": "lora_alpha",
    "rslora": "use_rslora",
    "targets": "target_modules",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "modules_to_save": "modules_to_save",
    "init": "init_lora_weights",
}
_SHOWN = 60
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def filled(section: AdapterSection, model: Any, loaded: LoadedRecipe) -> AdapterSection:
    """A section with all that its `from` says; unchanged where it says nothing, or the section says all itself.

    Args:
        section: the recipe's.
        model: that is adapted.
        loaded: the recipe.

    Raises:
        RecipeError: what the section says itself is something else, or does not go with it.
        ModelError, StorageError: there is no such adapter, or it cannot be read.
    """
    given = TAKEN & section.model_fields_set
    if section.source is None or given == TAKEN:
        return section
    known, place = _told(section.source, model, loaded)
    _refuse_disagreement(section, given, known, place, model, loaded.where)
    found = section.model_copy(update={key: getattr(known, key) for key in TAKEN})
    for key in ("quantize", "dropout"):
        if found.begins_with_weight and getattr(found, key):
            problem = f"{place} says init: {found.init}: its path began with a part of the weights, which stay whole"
            remedy = "leave it out; or name what redco export RUN --output DIR --adapter makes of it: a plain path"
            raise RecipeError(loaded.where(f"adapter.{key}"), problem, remedy)
    return found


def check_source(section: AdapterSection, model: Any, loaded: LoadedRecipe) -> None:
    """Refuses a section that says something else than its `from`, as a run that begins finds it.

    Raises:
        RecipeError, ModelError, StorageError: as `filled`.
    """
    if section.source is not None:
        known, place = _told(section.source, model, loaded)
        _refuse_disagreement(section, TAKEN, known, place, model, loaded.where)


def values_in(directory: Path, model: Any, places: Params) -> Params:
    """The parameters of an adapter that PEFT or diffusers wrote, where they live.

    Args:
        directory: of its files, which `check_source` has compared.
        model: that is adapted.
        places: the sharding of each.

    Raises:
        ModelError: as `read_peft`.
    """
    own = read_peft(directory, model)[1]
    return jax.tree.map(lambda array, at: jax.make_array_from_callback(array.shape, at, array.__getitem__), own, places)


def _told(source: str, model: Any, loaded: LoadedRecipe) -> tuple[AdapterSection, str]:
    """What an adapter's files say of it, and where they say so."""
    path, where = find_params(source, loaded.directory), loaded.where("adapter.from")
    file = config_file(path)
    if file is not None:
        adapter, _ = read_peft(path, model)
        return written_out(adapter, shown(path)), shown(file)
    for checkpoint in _checkpoints(path):
        try:
            said = json.loads((checkpoint / "meta" / "metadata").read_bytes())["recipe"].get("adapter")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # another one may be whole; whoever reads the values says what is wrong
        if not said:
            problem = f"{shown(checkpoint)} is of a run that trained no adapter"
            raise StorageError(where, problem, "name one that did; model.params takes the parameters of a model")
        try:
            return AdapterSection.model_validate({key: said[key] for key in TAKEN & said.keys()}), shown(checkpoint)
        except ValidationError as error:
            problem = f"{shown(checkpoint)} says of its adapter what this version does not read: {error.errors()[0]}"
            raise StorageError(
                where, problem, "export it with the version that wrote it: redco export --adapter"
            ) from None
    found = f"{source} has neither {CONFIG} nor a checkpoint of a run" if path.is_dir() else f"{source} is no directory"
    remedy = (
        "name a directory that PEFT, diffusers or redco export --adapter wrote, the output directory of a run that "
        "trained an adapter, or a checkpoint-<step> in it; once a run has begun it needs none: redco train OUTPUT_DIR"
    )
    raise StorageError(where, found, remedy)


def _checkpoints(path: Path) -> Iterator[Path]:
    """A checkpoint, or those of a run, the newest first."""
    if _CHECKPOINT.fullmatch(path.name):
        yield path
    found = {one: match for one in path.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(one.name))}
    yield from sorted(found, key=lambda one: int(found[one][1]), reverse=True)


def written_out(adapter: Adapter, place: str) -> AdapterSection:
    """A section that names each adapted weight by its whole path.

    Args:
        adapter: as its files have it.
        place: of these, for errors.

    Raises:
        ModelError: it adapts nothing.
    """
    if not adapter.adapters:
        raise ModelError(place, "it adapts no weight", "train its modules with train.freeze instead of an adapter")
    rslora, paths = adapter.section.rslora, sorted(adapter.adapters)
    ranks = {path: adapter.adapters[path].rank for path in paths}
    alphas = {path: _alpha(adapter.adapters[path], rslora) for path in paths}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return AdapterSection(
        type=adapter.section.type,
        rank=int(rank),
        alpha=alpha,
        rslora=rslora,
        targets=tuple(map(re.escape, paths)),
        rank_pattern={re.escape(path): own for path, own in ranks.items() if own != rank},
        alpha_pattern={re.escape(path): own for path, own in alphas.items() if own != alpha},
        modules_to_save=tuple(map(re.escape, sorted(adapter.saved))),
    )


def _alpha(how: LowRank, rslora: bool) -> float:
    """What the scale is of the rank; a whole number where it is one but for rounding."""
    alpha = how.scale * (math.sqrt(how.rank) if rslora else how.rank)
    return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-9) else alpha


def _refuse_disagreement(
    section: AdapterSection,
    given: Collection[str],
    known: AdapterSection,
    place: str,
    model: Any,
    where: Callable[[str], str],
) -> None:
    """Refuses keys of a section that come to another adapter than the one that is there."""
    other = [key for key in _IN_PEFT if key in given and getattr(section, key) != getattr(known, key)]
    if not other:
        return
    there = adapter_of(model, known, where)

    def differs(keys: Collection[str]) -> bool:
        changed = known.model_copy(update={key: getattr(section, key) for key in keys})
        try:
            return not _is_same(adapter_of(model, changed, where), there)
        except RecipeError:
            return True

    if differs(other):
        key = next((one for one in other if differs([one])), other[0])
        name = f"{place}: {_IN_PEFT[key]}" if place.endswith((CONFIG, FILE)) else f"{place}: adapter.{key}"
        own, theirs = (repr(getattr(one, key)) for one in (section, known))
        problem = f"{own:.{_SHOWN}} given, but {name} says {theirs:.{_SHOWN}}"
        remedy = f"leave {key} out, adapter.from says it; or leave adapter.from out, for a new adapter"
        raise RecipeError(where(f"adapter.{key}"), problem, remedy)


def _is_same(one: Adapter, other: Adapter) -> bool:
    """Whether two adapters have the same parameters, and compute the same with them."""
    kinds = [(each.section.type, each.section.begins_with_weight, set(each.saved)) for each in (one, other)]
    return (
        kinds[0] == kinds[1]
        and one.adapters.keys() == other.adapters.keys()
        and all(
            one.adapters[path].rank == how.rank and math.isclose(one.adapters[path].scale, how.scale, rel_tol=1e-6)
            for path, how in other.adapters.items()
        )
    )
