"""Small programs, each one way in which people write a layer. Their parameters have names that say nothing.

A builder returns a loss of (parameters, batch), the shapes of the parameters, and a batch.
Shape letters: B batch, L length, D hidden, F width of an MLP, H heads, P size of a head, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, L, D, F, H, P, V, LAYERS = 8, 16, 64, 256, 8, 8, 96, 3
Built = tuple[Callable[[Any, Any], Any], Any, dict[str, Any]]
SMALL: dict[str, Callable[[], Built]] = {}


def token_loss(logits: Any, labels: Any) -> Any:
    """Mean cross-entropy."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


@jax.custom_vjp
def doubled(x: Any) -> Any:
    """A function with a derivative of its own."""
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, gradient: (2 * gradient,))


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of [B, L, H, P]."""
    scores = jnp.einsum("bqhp,bkhp->bhqk", q, k) / P**0.5
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhp->bqhp", jax.nn.softmax(scores), v)


def small(name: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    def register(builder: Callable[[], Built]) -> Callable[[], Built]:
        SMALL[name] = builder
        return builder

    return register


def regression() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(B, L, D)).astype(np.float32) for name in ("x", "y")}


def language(vocabulary: int = V) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, vocabulary, (B, L)).astype(np.int32) for name in ("x", "y")}


def stack(block: Callable[[Any, Any], Any], shapes: dict[str, Any]) -> Built:
    """Residual layers of one block, each behind a norm, fitted to a target."""
    layer = {"zu": (D,), **shapes}

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for index in range(LAYERS):
            p = params[f"n{index}"]
            x = x + block(p, norm(x, p["zu"]))
        return ((x - batch["y"]) ** 2).mean()

    return loss_fn, {f"n{index}": dict(layer) for index in range(LAYERS)}, regression()


@small("mlp-chain")
def mlp_chain() -> Built:
    sizes = (D, F, 128, F, D)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for index in range(4):
            x = jnp.tanh(x @ params[f"ab{index}"] + params[f"ba{index}"])
        return ((x - batch["y"]) ** 2).mean()

    shapes = {f"ab{index}": (sizes[index], sizes[index + 1]) for index in range(4)}
    return loss_fn, {**shapes, **{f"ba{index}": (sizes[index + 1],) for index in range(4)}}, regression()


@small("mlp-residual")
def mlp_residual() -> Built:
    def block(p: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ p["wa"] + p["wb"]) @ p["wc"] + p["wd"]

    return stack(block, {"wa": (D, F), "wb": (F,), "wc": (F, D), "wd": (D,)})


@small("mlp-transposed")
def mlp_transposed() -> Built:
    """Kernels [out, in], as in GPT-2's Flax class."""

    def block(p: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ p["wa"].T + p["wb"]) @ p["wc"].T + p["wd"]

    return stack(block, {"wa": (F, D), "wb": (F,), "wc": (D, F), "wd": (D,)})


@small("gated-separate")
def gated_separate() -> Built:
    def block(p: Any, x: Any) -> Any:
        return (jax.nn.silu(x @ p["ka"]) * (x @ p["kb"])) @ p["kc"]

    return stack(block, {"ka": (D, F), "kb": (D, F), "kc": (F, D)})


@small("gated-halves")
def gated_halves() -> Built:
    """One kernel, its columns first all gates, then all values."""

    def block(p: Any, x: Any) -> Any:
        gate, up = jnp.split(x @ p["ka"], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ p["kc"]

    return stack(block, {"ka": (D, 2 * F), "kc": (F, D)})


@small("gated-2f")
def gated_2f() -> Built:
    """One kernel [D, 2, F]."""

    def block(p: Any, x: Any) -> Any:
        both = jnp.einsum("bld,dcf->blcf", x, p["ka"])
        return (jax.nn.silu(both[..., 0, :]) * both[..., 1, :]) @ p["kc"]

    return stack(block, {"ka": (D, 2, F), "kc": (F, D)})


@small("gated-interleaved")
def gated_interleaved() -> Built:
    """One kernel, its columns gate, value, gate, value."""

    def block(p: Any, x: Any) -> Any:
        both = (x @ p["ka"]).reshape(B, L, F, 2)
        return (jax.nn.silu(both[..., 0]) * both[..., 1]) @ p["kc"]

    return stack(block, {"ka": (D, 2 * F), "kc": (F, D)})


@small("gated-strided")
def gated_strided() -> Built:
    """The same, its columns taken two by two."""

    def block(p: Any, x: Any) -> Any:
        both = x @ p["ka"] + p["kb"]
        return (jax.nn.silu(both[..., ::2]) * both[..., 1::2]) @ p["kc"]

    return stack(block, {"ka": (D, 2 * F), "kb": (2 * F,), "kc": (F, D)})


@small("modulated")
def modulated() -> Built:
    """Each MLP shifted, scaled and gated by what one vector of an example says, as DiT's are."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        said = jax.nn.silu(jax.nn.silu(x.mean(1) @ params["ma"]) @ params["mb"])
        for index in range(LAYERS):
            p = params[f"n{index}"]
            shift, scale, gate = jnp.split((said @ p["mc"])[:, None], 3, axis=-1)
            x = x + gate * (jax.nn.gelu((norm(x, 1.0) * (1 + scale) + shift) @ p["wa"]) @ p["wc"])
        return ((x - batch["y"]) ** 2).mean()

    layer = {"mc": (D, 3 * D), "wa": (D, F), "wc": (F, D)}
    return loss_fn, {"ma": (D, D), "mb": (D, D), **{f"n{i}": dict(layer) for i in range(LAYERS)}}, regression()


@small("modulated-apart")
def modulated_apart() -> Built:
    """The same by kernels [D, 3, D] with a dim for shift, scale and gate, which no mesh divides."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        said = jax.nn.silu(x.mean(1))
        for index in range(LAYERS):
            p = params[f"n{index}"]
            shift, scale, gate = jnp.einsum("bd,dke->kbe", said, p["mc"])[:, :, None]
            x = x + gate * (jax.nn.gelu((norm(x, 1.0) * (1 + scale) + shift) @ p["wa"]) @ p["wc"])
        return ((x - batch["y"]) ** 2).mean()

    layer = {"mc": (D, 3, D), "wa": (D, F), "wc": (F, D)}
    return loss_fn, {f"n{i}": dict(layer) for i in range(LAYERS)}, regression()


@small("attention-flat")
def attention_flat() -> Built:
    def block(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[name] + p[name + "o"]).reshape(B, L, H, P) for name in ("ra", "rb", "rc"))
        return attend(q, k, v).reshape(B, L, H * P) @ p["rd"]

    biases = {"rao": (H * P,), "rbo": (H * P,), "rco": (H * P,)}
    return stack(block, {"ra": (D, H * P), "rb": (D, H * P), "rc": (D, H * P), "rd": (H * P, D), **biases})


@small("attention-general")
def attention_general() -> Built:
    """Kernels [D, H, P], as `DenseGeneral` has them."""

    def block(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bld,dhp->blhp", x, p[name]) for name in ("ra", "rb", "rc"))
        return jnp.einsum("blhp,hpd->bld", attend(q, k, v), p["rd"])

    return stack(block, {"ra": (D, H, P), "rb": (D, H, P), "rc": (D, H, P), "rd": (H, P, D)})


@small("attention-h3p")
def attention_h3p() -> Built:
    """One kernel, its columns [H, 3, P], as in BLOOM and GPT-NeoX."""

    def block(p: Any, x: Any) -> Any:
        q, k, v = jnp.split((x @ p["ra"] + p["rb"]).reshape(B, L, H, 3, P), 3, axis=-2)
        return attend(q[..., 0, :], k[..., 0, :], v[..., 0, :]).reshape(B, L, H * P) @ p["rd"]

    return stack(block, {"ra": (D, H * 3 * P), "rb": (H * 3 * P,), "rd": (H * P, D)})


@small("attention-3hp")
def attention_3hp() -> Built:
    """One kernel [D, 3, H, P]."""

    def block(p: Any, x: Any) -> Any:
        qkv = jnp.einsum("bld,dchp->cblhp", x, p["ra"]) + p["rb"][:, None, None]
        return attend(qkv[0], qkv[1], qkv[2]).reshape(B, L, H * P) @ p["rd"]

    return stack(block, {"ra": (D, 3, H, P), "rb": (3, H, P), "rd": (H * P, D)})


@small("attention-3hp-flat")
def attention_3hp_flat() -> Built:
    """One flat kernel, its columns [3, H, P], reshaped."""

    def block(p: Any, x: Any) -> Any:
        qkv = (x @ p["ra"] + p["rb"]).reshape(B, L, 3, H, P)
        return attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(B, L, H * P) @ p["rd"]

    return stack(block, {"ra": (D, 3 * H * P), "rb": (3 * H * P,), "rd": (H * P, D)})


@small("attention-thirds")
def attention_thirds() -> Built:
    """One flat kernel, split in thirds, as in GPT-2."""

    def block(p: Any, x: Any) -> Any:
        q, k, v = (one.reshape(B, L, H, P) for one in jnp.split(x @ p["ra"] + p["rb"], 3, axis=-1))
        return attend(q, k, v).reshape(B, L, H * P) @ p["rd"]

    return stack(block, {"ra": (D, 3 * H * P), "rb": (3 * H * P,), "rd": (H * P, D)})


@small("attention-transposed")
def attention_transposed() -> Built:
    """Kernels [out, in], heads in front of the length."""

    def block(p: Any, x: Any) -> Any:
        q, k, v = (
            jnp.einsum("bld,fd->blf", x, p[name]).reshape(B, L, H, P).transpose(0, 2, 1, 3)
            for name in ("ra", "rb", "rc")
        )
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / P**0.5)
        return jnp.einsum("blf,df->bld", (scores @ v).transpose(0, 2, 1, 3).reshape(B, L, H * P), p["rd"])

    return stack(block, {"ra": (H * P, D), "rb": (H * P, D), "rc": (H * P, D), "rd": (D, H * P)})


def _gqa(kv_heads: int, grouped: bool) -> Built:
    def block(p: Any, x: Any) -> Any:
        q = (x @ p["ra"]).reshape(B, L, H, P)
        k, v = ((x @ p[name]).reshape(B, L, kv_heads, P) for name in ("rb", "rc"))
        if grouped:
            q = q.reshape(B, L, kv_heads, H // kv_heads, P)
            scores = jax.nn.softmax(jnp.einsum("bqkgp,bskp->bkgqs", q, k) / P**0.5)
            out = jnp.einsum("bkgqs,bskp->bqkgp", scores, v)
        else:
            out = attend(q, *(jnp.repeat(one, H // kv_heads, axis=2) for one in (k, v)))
        return out.reshape(B, L, H * P) @ p["rd"]

    kv = (D, kv_heads * P)
    return stack(block, {"ra": (D, H * P), "rb": kv, "rc": kv, "rd": (H * P, D)})


for _kv in (1, 2, 4):
    small(f"gqa-{_kv}-grouped")(functools.partial(_gqa, _kv, True))
    small(f"gqa-{_kv}-repeated")(functools.partial(_gqa, _kv, False))


@small("parallel-block")
def parallel_block() -> Built:
    """Attention and MLP beside each other, as in GPT-J."""

    def block(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[name]).reshape(B, L, H, P) for name in ("ra", "rb", "rc"))
        return attend(q, k, v).reshape(B, L, H * P) @ p["rd"] + jax.nn.gelu(x @ p["wa"]) @ p["wc"]

    return stack(block, dict.fromkeys(("ra", "rb", "rc"), (D, H * P)) | {"rd": (H * P, D), "wa": (D, F), "wc": (F, D)})


EXPERTS, CAPACITY = 8, 8


@small("moe-dense")
def moe_dense() -> Built:
    """Every expert on every token."""

    def block(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ p["ga"])
        hidden = jax.nn.gelu(jnp.einsum("bld,edf->belf", x, p["gb"]))
        return jnp.einsum("belf,efd,ble->bld", hidden, p["gc"], gates)

    return stack(block, {"ga": (D, EXPERTS), "gb": (EXPERTS, D, F), "gc": (EXPERTS, F, D)})


@small("moe-capacity")
def moe_capacity() -> Built:
    """One expert a token, up to a capacity, by dispatch and combine products within each sequence."""

    def block(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ p["ga"])
        chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        dispatch = jax.nn.one_hot(place.astype(jnp.int32), CAPACITY) * chosen[..., None]
        sent = jnp.einsum("blec,bld->ebcd", dispatch, x)
        hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, p["gb"]))
        back = jnp.einsum("ebcf,efd->ebcd", hidden, p["gc"])
        return jnp.einsum("ble,blec,ebcd->bld", gates, dispatch, back)

    return stack(block, {"ga": (D, EXPERTS), "gb": (EXPERTS, D, F), "gc": (EXPERTS, F, D)})


@small("lora")
def lora() -> Built:
    """Pairs of rank 4 beside both kernels of an MLP."""

    def block(p: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(x @ p["wa"] + x @ p["ta"] @ p["tb"])
        return hidden @ p["wc"] + hidden @ p["tc"] @ p["td"]

    pairs = {"ta": (D, 4), "tb": (4, F), "tc": (F, 4), "td": (4, D)}
    return stack(block, {"wa": (D, F), "wc": (F, D), **pairs})


@small("bottleneck")
def bottleneck() -> Built:
    """A narrow layer instead of a wide one."""

    def block(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["wa"]) @ p["wc"]

    return stack(block, {"wa": (D, 8), "wc": (8, D)})


@small("ssm")
def ssm() -> Built:
    """A gated state space block as in Mamba: one kernel for both branches, a depthwise convolution, a recurrence."""

    def block(p: Any, x: Any) -> Any:
        inner, gate = jnp.split(x @ p["sa"], 2, axis=-1)
        inner = jax.lax.conv_general_dilated(
            inner, p["sb"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2 * D
        )
        inner = jax.nn.silu(inner + p["sc"])
        decay = jax.nn.sigmoid(p["sd"])

        def step(state: Any, now: Any) -> tuple[Any, Any]:
            state = state * decay + now
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros((B, 2 * D)), inner.swapaxes(0, 1))
        return (states.swapaxes(0, 1) * jax.nn.silu(gate)) @ p["se"]

    return stack(block, {"sa": (D, 4 * D), "sb": (4, 1, 2 * D), "sc": (2 * D,), "sd": (2 * D,), "se": (2 * D, D)})


@small("conv-net")
def conv_net() -> Built:
    rng = np.random.default_rng(0)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for name in ("ca", "cb"):
            x = jax.lax.conv_general_dilated(
                x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + params[name + "o"])
        return token_loss(x.reshape(B, 16 * 128) @ params["cd"] + params["cdo"], batch["y"])

    shapes = {
        "ca": (3, 3, 3, 32),
        "cao": (32,),
        "cb": (3, 3, 32, 128),
        "cbo": (128,),
        "cd": (16 * 128, 10),
        "cdo": (10,),
    }
    images = rng.normal(size=(B, 16, 16, 3)).astype(np.float32)
    return loss_fn, shapes, {"x": images, "y": rng.integers(0, 10, B).astype(np.int32)}


_LAYER = {"zu": (D,), "ra": (D, H * P), "rb": (D, H * P), "rc": (D, H * P), "rd": (H * P, D), "zo": (D,)}
_LAYER |= {"ka": (D, F), "kb": (D, F), "kc": (F, D)}


def _decoder_layer(p: Any, x: Any) -> Any:
    h = norm(x, p["zu"])
    q, k, v = ((h @ p[name]).reshape(B, L, H, P) for name in ("ra", "rb", "rc"))
    x = x + attend(q, k, v).reshape(B, L, H * P) @ p["rd"]
    h = norm(x, p["zo"])
    return x + (jax.nn.silu(h @ p["ka"]) * (h @ p["kb"])) @ p["kc"]


def _language(vocabulary: int, tied: bool, wrap: Any = None, chunked: bool = False) -> Built:
    """A decoder; scanned when `wrap` says how to wrap its layer."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["ea"][batch["x"]] + params["eb"]
        if wrap is None:
            for index in range(LAYERS):
                x = _decoder_layer(params[f"n{index}"], x)
        else:
            layer = wrap(_decoder_layer)
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["nn"])
        x = norm(x, params["ec"])
        head = params["ea"].T if tied else params["ed"]
        if not chunked:
            return token_loss(x @ head, batch["y"])

        @jax.checkpoint
        def chunk(total: Any, one: Any) -> tuple[Any, None]:
            return total + token_loss(one[0] @ head, one[1]), None

        chunks = x.reshape(B, 4, L // 4, D).swapaxes(0, 1), batch["y"].reshape(B, 4, L // 4).swapaxes(0, 1)
        return jax.lax.scan(chunk, jnp.zeros(()), chunks)[0] / 4

    layers = {f"n{index}": dict(_LAYER) for index in range(LAYERS)}
    if wrap is not None:
        layers = {"nn": {name: (LAYERS, *shape) for name, shape in _LAYER.items()}}
    shapes = {"ea": (vocabulary, D), "eb": (L, D), "ec": (D,), **layers}
    return loss_fn, shapes if tied else {**shapes, "ed": (D, vocabulary)}, language(vocabulary)


small("decoder")(functools.partial(_language, V, False))
small("decoder-tied")(functools.partial(_language, V, True))
small("decoder-97")(functools.partial(_language, 97, False))
small("decoder-97-tied")(functools.partial(_language, 97, True))
small("decoder-chunked")(functools.partial(_language, V, False, None, True))
small("decoder-scan")(functools.partial(_language, V, False, lambda layer: layer))
small("decoder-scan-remat")(functools.partial(_language, V, False, jax.checkpoint))
small("decoder-scan-chunked")(functools.partial(_language, V, False, jax.checkpoint, True))


@small("teacher-student")
def teacher_student() -> Built:
    """Two models in one tree; the second learns from the first."""

    def mlp(p: Any, x: Any) -> Any:
        for index in range(2):
            q = p[f"n{index}"]
            x = x + jax.nn.gelu(norm(x, q["zu"]) @ q["wa"]) @ q["wc"]
        return x

    def loss_fn(params: Any, batch: Any) -> Any:
        target = jax.lax.stop_gradient(mlp(params["uu"], batch["x"]))
        return ((mlp(params["vv"], batch["x"]) - target) ** 2).mean()

    def layers(width: int) -> Any:
        return {f"n{index}": {"zu": (D,), "wa": (D, width), "wc": (width, D)} for index in range(2)}

    return loss_fn, {"uu": layers(2 * F), "vv": layers(F)}, regression()
