"""Acts on a plan: parameters are put together where a program uses them, and their gradients scattered back.

In: a function, where each of its parameters lives and is used, and a mesh of devices. Out: the same function of
parameters in shards, to be differentiated and jitted. The MLP of the other rooms, on one device that stands for all:

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh
    >>> from redco_cli.sharding import derive
    >>> from redco_cli.sharding.example import batch, loss_fn, params
    >>> from redco_cli.sharding.gather.gathering import gathering
    >>> devices = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    >>> plan = derive(loss_fn, params, batch, dict(devices.shape))
    >>> same = gathering(loss_fn, plan.specs, plan.gathered, devices)
    >>> jax.eval_shape(same, params, batch) == jax.eval_shape(loss_fn, params, batch)
    True

Start at `gathering` (goes through the program, and says what happens at each use), then `sharded` (a parameter in
shards, what gathers it and adds up its gradient), `all_gather` (how it is put together), `replicas` (gradients of
products, once in a step) with `torus` (rings that a sum is scattered along), `rows` (of tables that are not
gathered), `fused` (several projections in one weight), `in_place` (what is done with weights where they live),
`by_rows` (weights that are split by rows alone), `unpartitioned` (what XLA splits wrongly or not), `neighbours`
(examples that take rows of one another), room `local` (weights of loops, and those made of smaller ones), `copies` (of
what several weights multiply) and `conditionals`. What XLA makes of it: room `compiled`.
"""
