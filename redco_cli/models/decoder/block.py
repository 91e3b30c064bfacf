"""One layer of a decoder: attention and MLP around the residual stream, with norms where the config places them."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from redco_cli.models.decoder.attention import PROJECTED, Attention
from redco_cli.models.decoder.cache import KVCache
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.experts.layer import Experts
from redco_cli.models.decoder.experts.mix import BRANCH
from redco_cli.models.decoder.layers import Mlp, Norm
from redco_cli.models.decoder.masks import AttentionContext, LayerTraits
from redco_cli.models.kernels.choice import Kernel
from redco_cli.models.kernels.mapped import ATTENDED

Array = Any
Remat = Literal["none", "dots", "attention", "offload", "full"]
"""What the backward pass of a layer recomputes: nothing, all but products with weights and attention, all but
attention, all but what waits in the host's memory (what the layer takes, queries, keys and values), all."""

_TAKEN = "layer_input"


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention and MLP around the residual stream.

    Attributes:
        config: the decoder's.
        dtype: compute type.
        train: whether dropout is active.
        kernel: which code computes attention.
    """

    config: DecoderConfig
    dtype: Any
    train: bool
    kernel: Kernel

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(
        self, x: Array, per_layer: tuple[LayerTraits, KVCache | None], context: AttentionContext
    ) -> tuple[Array, KVCache | None]:
        """The residual stream [B, S, E] after this layer, and the cache with these tokens in it."""
        c = self.config
        x = checkpoint_name(x, _TAKEN)
        layer, cache = per_layer
        attention = Attention(c, self.dtype, self.train, self.kernel, name="attention")
        before = c.norm_place in ("pre", "sandwich")
        normed = self._norm("attention_norm", x) if before else x
        attended, cache = attention(normed, layer, context, cache)
        if c.parallel != "no":
            inner = normed if c.parallel == "one_norm" else self._norm("mlp_norm", x)
            return self._add(self._add(x, attended), self._mlp(inner)), cache
        if c.norm_place in ("output", "sandwich"):
            attended = self._norm("attention_output_norm", attended)
        x = self._add(x, attended)
        if c.norm_place == "post":
            x = self._norm("attention_norm", x)
        widened = self._mlp(self._norm("mlp_norm", x) if before else x)
        if c.norm_place in ("output", "sandwich"):
            widened = self._norm("mlp_output_norm", widened)
        x = self._add(x, widened)
        return (self._norm("mlp_norm", x) if c.norm_place == "post" else x), cache

    def _norm(self, name: str, x: Array) -> Array:
        return Norm(self.config, self.dtype, name=name)(x)

    def _mlp(self, x: Array) -> Array:
        c = self.config
        if c.experts is not None:
            return Experts(c, self.dtype, name="experts")(x)
        return Mlp(c, c.mlp_width, self.dtype, name="mlp")(x)

    def _add(self, x: Array, what: Array) -> Array:
        what = nn.Dropout(self.config.residual_dropout, deterministic=not self.train)(what)
        return x + what * self.config.residual_scale


def _is_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether an operation gives what attention does: by its name, or cuDNN's kernel, which has none."""
    return params.get("name") == ATTENDED or primitive.name == "dot_product_attention_fwd_wrapper"


_policies = jax.checkpoint_policies
_all_of = _policies.save_from_both_policies
_keeps_branch = _policies.save_only_these_names(BRANCH)
POLICIES: dict[Remat, Any] = {
    "dots": _all_of(_policies.dots_with_no_batch_dims_saveable, _all_of(_is_attention, _keeps_branch)),
    "attention": _all_of(_is_attention, _keeps_branch),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[BRANCH],
        names_which_can_be_offloaded=[_TAKEN, PROJECTED],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "full": _keeps_branch,
}
"""By what is recomputed, what is kept; as `jax.checkpoint` takes it. Which branch experts take is kept always: it is
one number, that devices would have to agree upon again."""
