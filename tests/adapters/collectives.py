"""A small transformer with and without adapters, compiled for a mesh, and what it moves over `tensor`.

    PYTHONPATH=. python tests/adapters/collectives.py                        eight simulated CPU devices
    PYTHONPATH=. python tests/adapters/collectives.py tpu v5e:2x4            chips that need not be there: with libtpu,
    PYTHONPATH=. python tests/adapters/collectives.py cuda 8                 or with the wheels of jax[cuda12]

What is trained of the base are scales before each layer, so that its backward pass goes through all of them. What an
adapter adds to its collectives beyond gradients of its factors, it pays for each token.
"""

import functools
import os
import sys
from dataclasses import dataclass

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.uses import uses_of
from redco_cli.sharding.compiled.traffic import compiled_collectives, total_bytes
from redco_cli.sharding.derive import derive
from redco_cli.sharding.gather.gathering import gathering
from redco_cli.sharding.tensor_split import split_as, tensor_split

ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Sizes:
    """Layers, examples, tokens of each, features, heads, features of a head, width of the MLP, vocabulary, rank."""

    layers: int = 2
    batch: int = 8
    length: int = 12
    embed: int = 32
    heads: int = 4
    head: int = 8
    width: int = 64
    vocabulary: int = 48
    rank: int = 3
    dtype: str = "float32"


def loss_fn(params, batch, sizes):
    """The mean of the negated log-probabilities of the tokens themselves."""
    lengths = (sizes.batch, sizes.length)

    @jax.checkpoint
    def layer(x, own):
        y = x * own["scale"].astype(x.dtype)
        q, k, v = (jnp.einsum("ble,ehd->blhd", y, own[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / sizes.head**0.5)
        seen = jnp.einsum("bhqk,bkhd->bqhd", scores.astype(x.dtype), v).reshape(*lengths, -1)
        x = x + seen @ own["o"]
        y = x * own["scale"].astype(x.dtype)
        return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"], None

    x = jnp.take(params["embedding"], batch["ids"], axis=0)
    x = jax.lax.scan(layer, x, params["layers"])[0]
    logits = (x @ params["head"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["ids"][..., None], -1).mean()


def abstract(sizes):
    """The parameters, and a batch."""
    own = dict.fromkeys("qkv", (sizes.embed, sizes.heads, sizes.head))
    own |= {"o": (sizes.heads * sizes.head, sizes.embed), "down": (sizes.width, sizes.embed)}
    own |= {"gate": (sizes.embed, sizes.width), "up": (sizes.embed, sizes.width), "scale": (sizes.embed,)}
    shapes = {"layers": {name: (sizes.layers, *shape) for name, shape in own.items()}}
    shapes |= {"embedding": (sizes.vocabulary, sizes.embed), "head": (sizes.embed, sizes.vocabulary)}
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, sizes.dtype), shapes, is_leaf=_is_shape)
    return params, {"ids": jax.ShapeDtypeStruct((sizes.batch, sizes.length), "int32")}


def factors_of(sizes, adapted=ADAPTED, dora=False):
    """Abstract factors by path."""
    params, batch = abstract(sizes)
    uses = uses_of(functools.partial(loss_fn, sizes=sizes), params, batch)
    found = {}
    for path in (name if name in params else f"layers/{name}" for name in adapted):
        use = uses[path][0]
        shapes = {"A": (*use.stack, use.inputs, sizes.rank), "B": (*use.stack, sizes.rank, use.outputs)}
        shapes |= {"magnitude": (*use.stack, use.outputs)} if dora else {}
        found[path] = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    return found


def adapted_loss(sizes, how, *, knows_splits=True):
    """Of ({model, adapter}, batch); the adapter by path, empty for none."""
    plain = functools.partial(loss_fn, sizes=sizes)
    key = jax.random.key(0) if how.dropout else None

    def loss(params, batch):
        if not params.get("adapter"):
            return plain(params["model"], batch)
        paths = params["adapter"]
        splits = {path: split for path in paths if (split := tensor_split(f"model/{path}")) and knows_splits}
        adapted = adapting(plain, dict.fromkeys(paths, how), splits)
        return adapted(params["model"], paths, key, batch)

    return loss


PLAIN = LowRank(3, 0.5)


def step(sizes, mesh, params, how=PLAIN, *, knows_splits=True, devices=None, again=False):
    """Loss and gradients of what is trained, jitted for a mesh, with where its arguments live.

    Args:
        sizes: of the program.
        mesh: axis to size.
        params: `model`, and `adapter` or none; abstract or not.
        how: the factors are used.
        knows_splits: whether the path is told what is split.
        devices: default: those of this process.
        again: whether parameters are gathered again in the backward pass.
    """
    loss, batch = adapted_loss(sizes, how, knows_splits=knows_splits), abstract(sizes)[1]
    plan = derive(loss, params, batch, mesh)
    found = np.array(jax.devices()[:8] if devices is None else devices).reshape(tuple(mesh.values()))
    on = Mesh(found, tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))

    def placed(specs):
        return jax.tree.map(lambda spec: NamedSharding(on, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def on_the_mesh(params, batch):
        with split_as(plan, on):
            return loss(params, batch)

    gathers = gathering(on_the_mesh, plan.specs, plan.gathered, on, usage=plan.usage, reshard_after_forward=again)

    def run(params, batch):
        def of_trained(trained):
            layers = {**params["model"]["layers"], "scale": trained["scale"]}
            model = {**params["model"], "layers": layers}
            return gathers({"model": model, **{name: trained[name] for name in params if name == "adapter"}}, batch)

        return jax.value_and_grad(of_trained)(_trained(params))

    places = placed(plan.specs)
    batch_places = {"ids": NamedSharding(on, PartitionSpec(("data", "fsdp")))}
    outputs = (NamedSharding(on, PartitionSpec()), _trained(places))
    return jax.jit(run, in_shardings=(places, batch_places), out_shardings=outputs), (places, batch_places), plan


def _trained(params):
    return {"scale": params["model"]["layers"]["scale"], **{name: params[name] for name in params if name == "adapter"}}


def _is_shape(leaf):
    return isinstance(leaf, tuple)


def collectives(sizes, mesh, kind, **given):
    """Those of a compiled step; arguments as of `compiled_step`."""
    return compiled_collectives(compiled_step(sizes, mesh, kind, **given), mesh)


def compiled_step(sizes, mesh, kind, *, dora=False, adapted=ADAPTED, options=None, **given):
    """The step of a program.

    Args:
        sizes: of the program.
        mesh: axis to size.
        kind: `base` without an adapter, `alone` with one that is told nothing of the mesh, `together` with one that is.
        dora: whether it has magnitudes.
        adapted: names of what is.
        options: of the compiler.
        given: to `step`.
    """
    model, batch = abstract(sizes)
    params = {"model": model} | ({} if kind == "base" else {"adapter": factors_of(sizes, adapted, dora)})
    jitted, places, _ = step(sizes, mesh, params, knows_splits=kind == "together", **given)
    arguments = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), (params, batch), places
    )
    return jitted.lower(*arguments).compile(options)


def chips(platform, what):
    """The devices of a topology."""
    from jax.experimental import topologies

    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=what).devices
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{what}").devices


H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84929347584  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

if __name__ == "__main__":
    devices = chips(*sys.argv[1:3]) if len(sys.argv) > 1 else None
    large = Sizes(4, 32, 2048, 2048, 16, 128, 8192, 32768, 16, "bfloat16") if devices else Sizes()
    options = {"exec_time_optimization_effort": -1.0} if sys.argv[1:2] == ["tpu"] else None
    for mesh in ({"data": 2, "fsdp": 1, "tensor": 4}, {"data": 1, "fsdp": 4, "tensor": 2}):
        for kind in ("base", "alone", "together"):
            compiled = compiled_step(large, mesh, kind, devices=devices, options=options)
            moved = compiled_collectives(compiled, mesh)
            beside = [one for one in moved if "tensor" in one.axes]
            launches, memory = sum(one.count for one in beside), compiled.memory_analysis().temp_size_in_bytes
            print(f"{mesh} {kind}: over tensor {launches} launches of {total_bytes(beside):,} bytes; memory {memory:,}")
            for one in moved:
                axes = "+".join(one.axes)
                print(f"  {one.count:3} x {one.kind} {axes:12} {one.bytes:>12,} {one.shape:40} {one.source[-70:]}")
