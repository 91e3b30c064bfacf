"""The experts of one layer, with their router.

Shapes: as in `redco_cli.models.decoder.experts`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.models.decoder.config import DecoderConfig, ExpertsConfig
from redco_cli.models.decoder.experts.mix import LATER, Gating, Kernels, Summing, mix
from redco_cli.models.decoder.layers import ACTIVATIONS, Dense, Mlp
from redco_cli.sharding.tensor_split import splits_ending, sums_itself

Array = Any
_CLAMPED_SLOPE = 1.702


class Experts(nn.Module):  # type: ignore[misc]
    """The experts of one layer, with their router.

    Attributes:
        config: the decoder's.
        dtype: compute type.
    """

    config: DecoderConfig
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [B, S, E] to the same shape."""
        c, experts = self.config, self.config.experts
        assert experts is not None
        x = x.astype(self.dtype)
        normal = nn.initializers.normal(c.initializer_range)
        inward = (experts.count, c.hidden_size, experts.width)
        outward = (experts.count, experts.width, c.hidden_size)
        shapes = {"gate": inward, "up": inward, "down": outward}
        own = {name: self.param(name, normal, shape).astype(self.dtype) for name, shape in shapes.items()}
        for name, (count, _, width) in shapes.items() if experts.biases else ():
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (count, width))
            own[f"{name}_bias"] = bias.astype(self.dtype)
        logits = Dense(experts.count, experts.biases, self.dtype, c.initializer_range, name="router")(x)
        shares, chosen = routing(logits, experts)
        mixed = mix(x, Kernels(**own), shares.astype(self.dtype), chosen, _gating(c, experts), self._summing())
        if experts.shared_width:
            share = jax.nn.sigmoid(Dense(1, False, self.dtype, c.initializer_range, name="shared_router")(x))
            mixed = mixed + share * Mlp(c, experts.shared_width, self.dtype, name="shared")(x)
        return mixed

    def _summing(self) -> Summing:
        """How parts of sums over F are added up where these parameters are."""
        endings = {name: "/".join((*self.path, name)) for name in ("gate", "up", "down")}
        if not all(map(sums_itself, endings.values())):
            return None
        # The layers of a decoder are stacked.
        found = {name: [split.layer() for split in splits_ending(ending)] for name, ending in endings.items()}
        dims = {name: {split.dim for split in splits} for name, splits in found.items()}
        return found["down"][0] if dims == {"gate": {2}, "up": {2}, "down": {1}} else LATER


def _gating(config: DecoderConfig, experts: ExpertsConfig) -> Gating:
    """How the two inner projections of an expert become one."""
    act = ACTIVATIONS[config.activation]
    return (lambda gate, up: act(gate) * up) if experts.clamped_at is None else partial(_clamped, experts.clamped_at)


def _clamped(limit: float, gate: Array, up: Array) -> Array:
    """gpt-oss: a SwiGLU with a slope, its inputs bounded, the second one around one."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(_CLAMPED_SLOPE * gate)


def routing(logits: Array, experts: ExpertsConfig) -> tuple[Array, Array]:
    """Which experts a token goes to, and how much each of them counts.

    Args:
        logits: of the router [B, S, X].
        experts: how many are chosen, and whether their shares sum to one.

    Returns:
        Shares [B, S, N], float32, and the indices of the experts [B, S, N].
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    shares, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if experts.normalise:
        shares = shares / shares.sum(-1, keepdims=True)
    return shares, chosen
