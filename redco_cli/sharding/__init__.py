"""How the parameters of any JAX program are split over a mesh, derived by reading the program.

In: a loss, the shapes of its parameters and of a batch, and the sizes of a mesh. Out: a `Plan`, with a `PartitionSpec`
and its reason for every parameter, what a step will move, and warnings. Names of parameters are never looked at,
nothing is computed, and no device is needed.

One program is carried through all the rooms, an MLP of two matmuls on `fsdp=2, tensor=4`:

    >>> import inspect
    >>> from redco_cli.sharding import derive
    >>> from redco_cli.sharding.example import batch, loss_fn, mesh, params
    >>> for line in inspect.getsource(loss_fn).splitlines()[2:]:  # its body
    ...     print(line)
        hidden = jax.nn.gelu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"]) ** 2)
    >>> {name: leaf.shape for name, leaf in (params | batch).items()}
    {'up': (64, 256), 'down': (256, 64), 'x': (32, 64)}

The whole method is one call. A parameter lives where `specs` says, and is used where `gathered` says:

    >>> plan = derive(loss_fn, params, batch, mesh)
    >>> for row in plan.rows:
    ...     print(f"{row.path:5} {tuple(row.spec)} used as {tuple(row.gathered)}: {row.reason}")
    down  (('tensor', 'fsdp'),) used as ('tensor',): rows: sums over 256 features, 64 on each device
    up    ('fsdp', 'tensor') used as (None, 'tensor'): columns: makes 256 features, 64 on each device
    >>> for one in plan.collectives:
    ...     print(f"{one.count} {one.kind} over {one.axis}: {one.bytes:,} bytes, {one.what}")
    1 all-reduce over tensor: 4,096 bytes, partial sums of a matmul
    2 all-gather over fsdp: 32,768 bytes, parameters, where they are used
    2 reduce-scatter over fsdp: 16,384 bytes, gradients

How it comes to this, in reading order; each room's docstring goes on with the same program:

1. `program`: the logical axes of everything in it. `up` makes 256 features, and `down` sums over the same 256.
2. `decide`: which axes go over `tensor`, and where each parameter lives. Those 256: both matrices for one all-reduce.
3. `predict`: what a step moves, and the bytes that it needs on a device, without compiling.
4. `gather`: the same function of parameters that live so, for JAX to compile.
5. `compiled`: what XLA made of it, read from its text: the same all-reduce.

`derive` stands on top of the first three, and of `pieces`, a room for weights that are used in parts; `axes`, `plan`,
`batch_shards` and `tensor_split` lie below all. Around it a program needs

- `gathering(loss_fn, plan.specs, plan.gathered, mesh, usage=plan.usage)`: the loss of parameters that live in shards
  (fully sharded data parallelism), to be differentiated and jitted;
- `follow(opt_state, params, plan.specs)`: where optimizer state lives;
- `register_reference(name, function)`: what a kernel computes that a trace cannot look into, such as one in Pallas;
- `compiled_collectives(compiled, mesh)`: what a compiled program really moves, to compare with `plan.collectives`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from redco_cli.sharding.derive import derive, make_plan
from redco_cli.sharding.plan import Collective, Plan, Row
from redco_cli.sharding.program.reading import Reading, read
from redco_cli.sharding.program.reference import register_reference

if TYPE_CHECKING:
    from redco_cli.sharding.compiled.traffic import CompiledCollective, compiled_collectives
    from redco_cli.sharding.decide.follow import follow
    from redco_cli.sharding.gather.gathering import gathering

__all__ = [
    "Collective",
    "CompiledCollective",
    "Plan",
    "Reading",
    "Row",
    "compiled_collectives",
    "derive",
    "follow",
    "gathering",
    "make_plan",
    "read",
    "register_reference",
]

_HOMES = {
    "CompiledCollective": "redco_cli.sharding.compiled.traffic",
    "compiled_collectives": "redco_cli.sharding.compiled.traffic",
    "follow": "redco_cli.sharding.decide.follow",
    "gathering": "redco_cli.sharding.gather.gathering",
}


def __getattr__(name: str) -> Any:
    """Imports on first use what a derivation does not need."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
