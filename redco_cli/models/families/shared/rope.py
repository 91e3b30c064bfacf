"""Rotary positions as Hugging Face configs describe them, with every kind of scaling."""

from __future__ import annotations

import math
from typing import Any

from redco_cli.models.decoder.config import Rope
from redco_cli.models.families.shared.settings import Settings
from redco_cli.models.known_keys import rope_keys

_CORRECT = "correct the config"


def read_rope(settings: Settings, head_dim: int, *, partial: bool = False) -> Rope:
    """The rotary positions of a config, in the keys of transformers 4.

    Args:
        settings: the config's.
        head_dim: dims of a head.
        partial: whether the family turns some of them only, as `partial_rotary_factor` says.

    Raises:
        ModelError: a kind of scaling that is not known, or a setting of it that makes no sense.
    """
    theta, part = settings.positive("rope_theta"), settings.number("partial_rotary_factor", 1.0)
    if part != 1 and not partial:
        settings.refuse("partial_rotary_factor", f"{settings.family} turns all dims of a head, not {part:g} of them")
    dims = int(head_dim * part)
    if dims % 2 or not 0 < dims <= head_dim:
        settings.refuse("partial_rotary_factor", f"{dims} dims of a head cannot turn in pairs", _CORRECT)
    scaling = settings("rope_scaling")
    if not scaling:
        return Rope(theta=theta, dims=dims)
    if not isinstance(scaling, dict):
        settings.refuse("rope_scaling", f"rope_scaling must be a mapping, not {scaling!r}", _CORRECT)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in _KINDS:
        settings.refuse("rope_scaling", f"rope_scaling has the unknown type {kind!r}")
    for key in scaling.keys() - rope_keys(kind) - {"type", "rope_type", "rope_theta"}:
        settings.ignore(f"rope_scaling.{key}")
    other = scaling.get("rope_theta", theta)
    if other != theta:  # transformers 4 reads the one outside, transformers 5 the one inside
        problem = f"rope_theta is {theta:g}, and {other!r} in rope_scaling"
        settings.refuse("rope_scaling", problem, _CORRECT)
    try:
        rope = _KINDS[kind](settings, scaling, theta, dims)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        settings.refuse("rope_scaling", f"rope_scaling of type {kind} is damaged: {error!r}", _CORRECT)
    problem = _nonsense(rope)
    if problem:
        settings.refuse("rope_scaling", f"rope_scaling of type {kind} makes no sense: {problem}", _CORRECT)
    return rope


def _nonsense(rope: Rope) -> str:
    """What cannot be computed with."""
    if not rope.factor > 0:
        return f"factor must be positive, not {rope.factor:g}"
    if rope.kind in ("dynamic", "yarn", "llama3", "longrope") and not rope.positions > 0:
        return f"original_max_position_embeddings must be positive, not {rope.positions}"
    if rope.kind == "dynamic" and rope.dims == 2:
        return "there is only one pair of dims"
    if rope.kind == "yarn" and not (rope.theta > 1 and rope.fast_turns > 0 and rope.slow_turns > 0):
        return "rope_theta must be above 1, beta_fast and beta_slow positive"
    if rope.kind == "llama3" and not rope.high_frequency > rope.low_frequency:
        return "high_freq_factor must be above low_freq_factor"
    return ""


def _number(scaling: Any, key: str) -> float:
    """A setting that is a number, and not text that looks like one.

    Raises:
        KeyError: it is absent.
        TypeError: it is something else.
    """
    value = scaling[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{key} must be a number, not {value!r}")
    return float(value)


def _plain(_settings: Settings, _scaling: Any, theta: float, dims: int) -> Rope:
    return Rope(theta=theta, dims=dims)


def _linear(_settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    return Rope(theta=theta, dims=dims, kind="linear", factor=_number(scaling, "factor"))


def _dynamic(settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    positions = settings.size("max_position_embeddings")
    return Rope(theta=theta, dims=dims, kind="dynamic", factor=_number(scaling, "factor"), positions=positions)


def _llama3(_settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    return Rope(
        theta=theta,
        dims=dims,
        kind="llama3",
        factor=_number(scaling, "factor"),
        positions=int(_number(scaling, "original_max_position_embeddings")),
        low_frequency=_number(scaling, "low_freq_factor"),
        high_frequency=_number(scaling, "high_freq_factor"),
    )


def _yarn(settings: Settings, scaling: Any, theta: float, dims: int) -> Rope:
    factor = _number(scaling, "factor")
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        weights = [scaling.get("mscale"), scaling.get("mscale_all_dim")]
        if all(weights):
            magnitude = _yarn_magnitude(factor, weights[0]) / _yarn_magnitude(factor, weights[1])
        else:
            magnitude = _yarn_magnitude(factor)
    return Rope(
        theta=theta,
        dims=dims,
        kind="yarn",
        factor=factor,
        positions=int(scaling.get("original_max_position_embeddings") or settings.size("max_position_embeddings")),
        fast_turns=float(scaling.get("beta_fast") or 32),
        slow_turns=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        magnitude=float(magnitude),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """By how much YaRN sharpens attention for sequences that are `factor` times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


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
        raise ValueError(f"{dims // 2} short and long factors are needed")
    return Rope(
        theta=theta, dims=dims, kind="longrope", positions=positions, magnitude=float(magnitude), short_factors=short,
        long_factors=long,
    )  # fmt: skip


_KINDS = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
