"""Rotary positions as transformers 5 writes them, in the keys of transformers 4.

transformers 4 writes `rope_theta`, `rope_scaling` and `partial_rotary_factor`; transformers 5 writes all of it in
`rope_parameters`, for each type of layer where they differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.families.shared.family import RopeKeys


def in_old_keys(config: Any, keys: RopeKeys, *, where: Callable[[str], str]) -> Any:
    """A config with its ropes in the keys of transformers 4, which transformers 5 reads too.

    Args:
        config: a transformers config; unchanged.
        keys: how its family spells them.
        where: a setting's name to its place, for errors.

    Returns:
        The config itself where it has no `rope_parameters`, else a copy.

    Raises:
        ModelError: `rope_parameters` hold what these keys cannot say, or contradict them.
    """
    given = getattr(config, "rope_parameters", None)
    if not given or not hasattr(config, "rope_theta"):
        return config
    config = copy.deepcopy(config)
    del config.rope_parameters
    try:
        if hasattr(config, "rope_local_base_freq"):
            near = dict(given["sliding_attention"])
            config.rope_local_base_freq = near.pop("rope_theta", config.rope_local_base_freq)
            if near.pop("rope_type", "default") != "default" or near:
                raise ValueError("layers with a window have plain rotary positions")
            given = given["full_attention"]
        _set_old_keys(config, keys, dict(given))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{config.model_type} cannot follow rope_parameters {given!r}: {error!r}"
        raise ModelError(where("rope_parameters"), problem, "correct the config") from None
    return config


def _set_old_keys(config: Any, keys: RopeKeys, given: dict[str, Any]) -> None:
    """Sets `rope_theta`, `rope_scaling` and `partial_rotary_factor` of a config from its `rope_parameters`.

    Raises:
        ValueError: the versions of transformers read these parameters differently.
    """
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError("all layers have the same rotary positions")
    config.rope_theta = given.pop("rope_theta", config.rope_theta)
    if "partial_rotary_factor" in given:
        config.partial_rotary_factor = given.pop("partial_rotary_factor")
    kind = given.pop("rope_type", given.pop("type", "default"))
    length = given.get("original_max_position_embeddings")
    if kind == "dynamic" and length not in (None, config.max_position_embeddings):
        raise ValueError("original_max_position_embeddings is not max_position_embeddings")
    if kind == "dynamic":
        given.pop("original_max_position_embeddings", None)
    if kind == "longrope":
        if "factor" in given:
            raise ValueError("longrope has a factor")
        given.pop("original_max_position_embeddings", None)
        config.original_max_position_embeddings = getattr(config, "original_max_position_embeddings", None) or length
    scaling = {keys.kind: kind, **given}
    if getattr(config, "rope_scaling", None) not in (None, scaling):
        raise ValueError(f"rope_scaling is {config.rope_scaling!r}")
    config.rope_scaling = scaling if kind != "default" or given else None
    for ours, theirs in keys.aliases.items():
        setattr(config, theirs, getattr(config, ours))
