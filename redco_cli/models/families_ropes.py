"""Rotary positions as Hugging Face configs describe them: `rope_theta`, `rope_scaling`, `partial_rotary_factor`."""

from __future__ import annotations

import math
from typing import Any

from redco_cli.models.decoder_config import Rope
from redco_cli.models.decoder_positions import yarn_magnitude
from redco_cli.models.families_settings import Settings, named

_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": named(
        "factor attention_factor mscale mscale_all_dim beta_fast beta_slow truncate original_max_position_embeddings"
    ),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}
    ),
}
"""What each kind of scaling reads; `dynamic` is given the length of pre-training and does not use it."""


def read_rope(settings: Settings, head_dim: int) -> Rope:
    """The rotary positions of a config.

    Args:
        settings: the config's.
        head_dim: dims of a head, of which `partial_rotary_factor` says how many turn.

    Raises:
        ModelError: a kind of scaling, or a setting of it, that is not known.
    """
    theta = settings.number("rope_theta", 10000.0)
    dims = int(head_dim * settings.number("partial_rotary_factor", 1.0))
    if dims % 2 or not dims:
        settings.refuse("partial_rotary_factor", f"{dims} dims of a head cannot turn in pairs", "correct the config")
    scaling = settings("rope_scaling")
    if not scaling:
        return Rope(theta=theta, dims=dims)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KEYS:
        settings.refuse("rope_scaling", f"rope_scaling has the unknown type {kind!r}")
    for key in scaling.keys() - _KEYS[kind] - {"type", "rope_type", "rope_theta"}:
        settings.refuse("rope_scaling", f"rope_scaling of type {kind} has {key}, which nothing here computes")
    try:
        return _SCALED[kind](settings, scaling, theta, dims)
    except (KeyError, TypeError) as error:
        settings.refuse("rope_scaling", f"rope_scaling of type {kind} is damaged: {error!r}", "correct the config")


def _plain(_settings: Settings, _scaling: Any, theta: float, dims: int) -> Rope:
    return Rope(theta=theta, dims=dims)


def _linear(_settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    return Rope(theta=theta, dims=dims, kind="linear", factor=float(scaling["factor"]))


def _dynamic(settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    positions = settings.size("max_position_embeddings")
    return Rope(theta=theta, dims=dims, kind="dynamic", factor=float(scaling["factor"]), positions=positions)


def _llama3(_settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    return Rope(
        theta=theta,
        dims=dims,
        kind="llama3",
        factor=float(scaling["factor"]),
        positions=int(scaling["original_max_position_embeddings"]),
        low_frequency=float(scaling["low_freq_factor"]),
        high_frequency=float(scaling["high_freq_factor"]),
    )


def _yarn(settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    factor = float(scaling["factor"])
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        weights = [scaling.get("mscale"), scaling.get("mscale_all_dim")]
        if all(weights):
            magnitude = yarn_magnitude(factor, weights[0]) / yarn_magnitude(factor, weights[1])
        else:
            magnitude = yarn_magnitude(factor)
    return Rope(
        theta=theta,
        dims=dims,
        kind="yarn",
        factor=factor,
        positions=scaling.get("original_max_position_embeddings") or settings.size("max_position_embeddings"),
        fast_turns=float(scaling.get("beta_fast") or 32),
        slow_turns=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        magnitude=float(magnitude),
    )


def _longrope(settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    longest = settings.size("max_position_embeddings")
    original = settings("original_max_position_embeddings")
    factor = longest / original if original else float(scaling.get("factor", 1.0))
    positions = original or longest
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(positions)) if factor > 1 else 1.0
    short, long = (tuple(map(float, scaling[key])) for key in ("short_factor", "long_factor"))
    if not len(short) == len(long) == dims // 2:
        settings.refuse("rope_scaling", f"rope_scaling needs {dims // 2} short and long factors", "correct the config")
    return Rope(
        theta=theta, dims=dims, kind="longrope", positions=positions, magnitude=float(magnitude), short_factors=short,
        long_factors=long,
    )  # fmt: skip


_SCALED = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
