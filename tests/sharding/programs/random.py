"""Random small programs: stacks of MLPs and attentions in many styles, and what must stay whole in each parameter.

Shape letters: B batch, L length, D hidden, F width of an MLP, H heads, K KV heads, P size of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.sharding.programs.small import norm, token_loss

B, L, D = 8, 8, 32
WHOLE = 0
"""A unit: this dim is in one piece."""

Shapes = dict[str, tuple[int, ...]]
Units = dict[str, tuple[int, ...]]
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jnp.tanh}


@dataclass(frozen=True)
class Mlp:
    """One MLP.

    Attributes:
        width: F.
        gate: `none`, or how the gate lies beside the values: `apart`, `halves` of one kernel, `two` as a dim of it.
        transposed: kernels [out, in].
        biased: with biases.
        flat: on [B * L, D].
        activation: a name.
    """

    width: int
    gate: str
    transposed: bool
    biased: bool
    flat: bool
    activation: str

    def shapes(self) -> Shapes:
        """Of the parameters."""
        columns = {"apart": self.width, "none": self.width, "halves": 2 * self.width, "two": 2 * self.width}[self.gate]
        up: tuple[int, ...] = (D, 2, self.width) if self.gate == "two" else (D, columns)
        found = {"up": up, "down": (self.width, D)}
        if self.gate == "apart":
            found["gate"] = (D, self.width)
        if self.biased:
            found |= {"up_bias": up[1:], "down_bias": (D,)}
        if self.transposed:
            found |= {name: shape[::-1] for name, shape in found.items() if len(shape) == 2 and "bias" not in name}
        return found

    def units(self) -> Units:
        """For each dim how much of it stays together at use."""
        return {name: (1,) * len(shape) for name, shape in self.shapes().items()}

    def pair(self) -> dict[str, int]:
        """The dims of the width: of the parameter that makes it, and of the one that sums over it."""
        turned = self.transposed and self.gate != "two"
        return {"up": 0 if turned else len(self.shapes()["up"]) - 1, "down": int(self.transposed)}

    def apply(self, p: Any, x: Any) -> Any:
        """[B, L, D] to the same."""
        y = x.reshape(B * L, D) if self.flat else x
        up, down = (self._kernel(p[name]) for name in ("up", "down"))
        hidden = jnp.einsum("...d,dgf->...gf", y, up) if self.gate == "two" else y @ up
        if self.biased:
            hidden = hidden + p["up_bias"]
        act = ACTIVATIONS[self.activation]
        if self.gate == "halves":
            gate, hidden = jnp.split(hidden, 2, axis=-1)
            hidden = act(gate) * hidden
        elif self.gate == "two":
            hidden = act(hidden[..., 0, :]) * hidden[..., 1, :]
        elif self.gate == "apart":
            hidden = act(y @ self._kernel(p["gate"])) * hidden
        else:
            hidden = act(hidden)
        out = hidden @ down
        return (out + p["down_bias"] if self.biased else out).reshape(B, L, D)

    def _kernel(self, kernel: Any) -> Any:
        return kernel.T if self.transposed and kernel.ndim == 2 else kernel


@dataclass(frozen=True)
class Attention:
    """One attention.

    Attributes:
        heads: H.
        group: queries of one KV head: K = H / group.
        size: P.
        style: `flat` kernels [D, H * P], `general` ones [D, H, P], `thirds` of one [D, 3 * H * P], or one `by_head`
            [D, H * 3 * P].
        grouped: KV heads meet their queries in one einsum instead of being repeated.
        biased: with biases of queries, keys and values.
        causal: with a mask.
    """

    heads: int
    group: int
    size: int
    style: str
    grouped: bool
    biased: bool
    causal: bool

    @property
    def kv(self) -> int:
        """K."""
        return self.heads // self.group if self.style in ("flat", "general") else self.heads

    def shapes(self) -> Shapes:
        """Of the parameters."""
        h, k, p = self.heads, self.kv, self.size
        if self.style == "flat":
            found: Shapes = {"q": (D, h * p), "k": (D, k * p), "v": (D, k * p), "o": (h * p, D)}
        elif self.style == "general":
            found = {"q": (D, h, p), "k": (D, k, p), "v": (D, k, p), "o": (h, p, D)}
        else:
            found = {"qkv": (D, 3 * h * p), "o": (h * p, D)}
        if self.biased:
            found |= {f"{name}_bias": shape[1:] for name, shape in found.items() if name != "o"}
        return found

    def units(self) -> Units:
        """For each dim how much of it stays together at use: a head, or the three heads that lie together."""
        if self.style == "general":
            found: Units = {"q": (1, 1, WHOLE), "k": (1, 1, WHOLE), "v": (1, 1, WHOLE), "o": (1, WHOLE, 1)}
        elif self.style == "flat":
            found = {"q": (1, self.size), "k": (1, self.size), "v": (1, self.size), "o": (self.size, 1)}
        else:
            found = {"qkv": (1, {"thirds": 1, "by_head": 3 * self.size}[self.style]), "o": (self.size, 1)}
        if self.biased:
            found |= {f"{name}_bias": unit[1:] for name, unit in found.items() if name != "o"}
        return found

    def pair(self) -> dict[str, int]:
        """The dims of the heads: of the parameter that makes the queries, and of the output."""
        return {"q" if self.style in ("flat", "general") else "qkv": 1, "o": 0}

    def apply(self, p: Any, x: Any) -> Any:
        """[B, L, D] to the same."""
        q, k, v = self._project(p, x)
        mask = jnp.tril(jnp.ones((L, L), bool)) if self.causal else True
        if self.grouped and self.group > 1 and self.kv < self.heads:
            q = q.reshape(B, L, self.kv, self.group, self.size)
            scores = jnp.einsum("bqkgp,bskp->bkgqs", q, k) / self.size**0.5
            out = jnp.einsum("bkgqs,bskp->bqkgp", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
        else:
            k, v = (jnp.repeat(one, self.heads // self.kv, axis=2) for one in (k, v))
            scores = jnp.einsum("bqhp,bkhp->bhqk", q, k) / self.size**0.5
            out = jnp.einsum("bhqk,bkhp->bqhp", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
        if self.style == "general":
            return jnp.einsum("blhp,hpd->bld", out.reshape(B, L, self.heads, self.size), p["o"])
        return out.reshape(B, L, self.heads * self.size) @ p["o"]

    def _project(self, p: Any, x: Any) -> tuple[Any, ...]:
        bias = (lambda name, y: y + p[f"{name}_bias"]) if self.biased else (lambda name, y: y)
        if self.style == "general":
            return tuple(bias(name, jnp.einsum("bld,dhp->blhp", x, p[name])) for name in "qkv")
        if self.style == "flat":
            sizes = {"q": self.heads, "k": self.kv, "v": self.kv}
            return tuple(bias(name, x @ p[name]).reshape(B, L, n, self.size) for name, n in sizes.items())
        both = bias("qkv", x @ p["qkv"])
        if self.style == "thirds":
            return tuple(one.reshape(B, L, self.heads, self.size) for one in jnp.split(both, 3, axis=-1))
        three = both.reshape(B, L, self.heads, 3, self.size)
        return tuple(three[..., i, :] for i in range(3))


Block = Mlp | Attention


@dataclass(frozen=True)
class Sketch:
    """A language model.

    Attributes:
        blocks: of one layer.
        layers: their number; each has parameters of its own.
        scanned: layers are stacked, and scanned.
        remat: each layer is computed again in the backward pass.
        normed: a norm before each block.
        residual: blocks are added to what they take.
        tied: the head is the embedding.
        vocabulary: V.
        mesh: (data, fsdp, tensor), eight devices.
    """

    blocks: tuple[Block, ...]
    layers: int
    scanned: bool
    remat: bool
    normed: bool
    residual: bool
    tied: bool
    vocabulary: int
    mesh: tuple[int, int, int]

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh axes."""
        return dict(zip(("data", "fsdp", "tensor"), self.mesh, strict=True))

    def _of_blocks(self, of: Callable[[Block], dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
        return {f"{i}.{name}": entry for i, block in enumerate(self.blocks) for name, entry in of(block).items()}

    def _everywhere(self, layer: dict[str, Any], stacked: Any, rest: dict[str, Any]) -> dict[str, Any]:
        if self.scanned:
            return {**{name: (stacked, *entry) for name, entry in layer.items()}, **rest}
        return {**{f"{n}.{name}": entry for n in range(self.layers) for name, entry in layer.items()}, **rest}

    def shapes(self) -> Shapes:
        """Of all parameters."""
        layer = self._of_blocks(lambda block: block.shapes())
        if self.normed:
            layer |= {f"{i}.norm": (D,) for i in range(len(self.blocks))}
        rest = {"embedding": (self.vocabulary, D)} | ({} if self.tied else {"head": (D, self.vocabulary)})
        return self._everywhere(layer, self.layers, rest)

    def units(self) -> Units:
        """For each parameter and dim how much of it stays together at use; `WHOLE` where nothing is split."""
        layer = self._of_blocks(lambda block: block.units())
        if self.normed:
            layer |= {f"{i}.norm": (1,) for i in range(len(self.blocks))}
        return self._everywhere(layer, WHOLE, {"embedding": (1, 1)} | ({} if self.tied else {"head": (1, 1)}))

    def pairs(self) -> list[dict[str, int]]:
        """Parameters and dims that are split together or not at all."""
        layers = [""] if self.scanned else [f"{n}." for n in range(self.layers)]
        return [
            {f"{layer}{i}.{name}": dim + self.scanned for name, dim in block.pair().items()}
            for layer in layers
            for i, block in enumerate(self.blocks)
        ]

    def loss(self, p: Any, batch: Any) -> Any:
        """Of parameters by the names of `shapes`."""
        x = p["embedding"][batch["x"]]
        inner = [name for name in p if name not in ("embedding", "head")]
        layer = jax.checkpoint(self._layer) if self.remat else self._layer
        if self.scanned:
            x, _ = jax.lax.scan(lambda x, one: (layer(one, x), None), x, {name: p[name] for name in inner})
        else:
            for n in range(self.layers):
                x = layer({name.split(".", 1)[1]: p[name] for name in inner if name.startswith(f"{n}.")}, x)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return token_loss(x @ (p["embedding"].T if self.tied else p["head"]), batch["y"])

    def _layer(self, p: Any, x: Any) -> Any:
        for i, block in enumerate(self.blocks):
            mine = {name.split(".", 1)[1]: value for name, value in p.items() if name.startswith(f"{i}.")}
            y = block.apply(mine, norm(x, mine["norm"]) if self.normed else x)
            x = x + y if self.residual else y
        return x

    def batch(self) -> dict[str, Any]:
        """Tokens and labels."""
        rng = np.random.default_rng(0)
        return {name: rng.integers(0, self.vocabulary, (B, L)).astype(np.int32) for name in ("x", "y")}

    def values(self) -> dict[str, Any]:
        """Random parameters, such that nothing grows through a layer."""
        rng = np.random.default_rng(1)

        def draw(shape: tuple[int, ...]) -> Any:
            return (rng.normal(size=shape) * (0.2 if len(shape) > 1 else 0.5)).astype(np.float32)

        return {name: draw(shape) + ("norm" in name) for name, shape in self.shapes().items()}


MESHES = [(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0]

mlps = st.builds(
    Mlp,
    width=st.sampled_from([64, 96, 128, 100]),
    gate=st.sampled_from(["none", "apart", "halves", "two"]),
    transposed=st.booleans(),
    biased=st.booleans(),
    flat=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
attentions = st.builds(
    Attention,
    heads=st.sampled_from([8, 8, 4, 16]),
    group=st.sampled_from([1, 1, 2, 4]),
    size=st.sampled_from([8, 16]),
    style=st.sampled_from(["flat", "general", "thirds", "by_head"]),
    grouped=st.booleans(),
    biased=st.booleans(),
    causal=st.booleans(),
)


def drawn(most_blocks: int, layers: list[int]) -> st.SearchStrategy[Sketch]:
    """Language models of some size."""
    return st.builds(
        Sketch,
        blocks=st.lists(st.one_of(mlps, attentions), min_size=1, max_size=most_blocks).map(tuple),
        layers=st.sampled_from(layers),
        scanned=st.booleans(),
        remat=st.booleans(),
        normed=st.booleans(),
        residual=st.booleans(),
        tied=st.booleans(),
        vocabulary=st.sampled_from([64, 96, 97, 100]),
        mesh=st.sampled_from(MESHES),
    )


sketches = drawn(3, [1, 2, 4])
small_sketches = drawn(2, [1, 2])
