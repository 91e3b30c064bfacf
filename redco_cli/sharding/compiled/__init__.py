"""Reads what XLA made of a step, to stand beside what was predicted of it.

In: what `jax.jit(step).lower(...).compile()` returns. Out: its collectives with their mesh axes and bytes, and its
memory cut into the same kinds as `predict.memory` cuts them. Nothing below this room imports it.

The step is compiled for eight devices, here fake ones of a CPU (`--xla_force_host_platform_device_count=8`):

    >>> import jax
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
    >>> from redco_cli.sharding import compiled_collectives, derive, gathering
    >>> from redco_cli.sharding.example import batch, loss_fn, mesh, params
    >>> plan = derive(loss_fn, params, batch, mesh)
    >>> devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * 3)
    >>> stored = {name: NamedSharding(devices, spec) for name, spec in plan.specs.items()}
    >>> step = jax.jit(
    ...     jax.value_and_grad(gathering(loss_fn, plan.specs, plan.gathered, devices)),
    ...     in_shardings=(stored, NamedSharding(devices, PartitionSpec(("data", "fsdp")))),
    ...     out_shardings=(None, stored),
    ... )
    >>> found = compiled_collectives(step.lower(params, batch).compile(), mesh)

Over `tensor` it has the one all-reduce that was predicted, and over `fsdp` it gathers the bytes that were predicted:

    >>> [(one.kind, one.shape, one.bytes) for one in found if one.axes == ("tensor",)]
    [('all-reduce', 'f32[16,64]', 4096)]
    >>> sum(one.bytes for one in found if one.kind == "all-gather")
    32768
    >>> [(one.kind, one.bytes) for one in plan.collectives][:2]
    [('all-reduce', 4096), ('all-gather', 32768)]

and scatters their gradients back to the shards that `sharding.gather.replicas` sums by itself, on any device:

    >>> [(one.axes, one.bytes) for one in found if one.kind == "reduce-scatter"]
    [(('fsdp',), 8192), (('fsdp',), 8192)]

Of gradients that it cannot take apart XLA for a CPU makes all-reduces, where that for a GPU or TPU often
reduce-scatters, so compare like with like.

Start at `traffic` (collectives of a program, loops counted), then `hlo` (its text as instructions, with trip counts of
loops), `memory` (what a compiled step says of its memory), `schedule` (kernels, and what runs while bytes move),
`timeline` (all that happens in a step, in its order, as `events`) with `work` (what one kernel computes and moves),
`attention` (the same of fused attention) and `slices` (what slices of TPUs send each other).
"""
