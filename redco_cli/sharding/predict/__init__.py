"""Predicts a step without compiling it: what it moves over the mesh, and the bytes it needs on one device.

In: a `Reading` with its layouts for the traffic; a loss, its optimizer state and a plan for the memory. Out:
`Collective`s by kind, mesh axis and meaning; a `StepMemory` at the worst moment of a train step.

    >>> from redco_cli.sharding.decide.choose import choose
    >>> from redco_cli.sharding.decide.layout import lay_out
    >>> from redco_cli.sharding.example import batch, loss_fn, mesh, params
    >>> from redco_cli.sharding.predict.collectives import predict_collectives
    >>> from redco_cli.sharding.program.reading import read
    >>> reading = read(loss_fn, params, batch)
    >>> chosen = choose(reading, tensor=4, batch_ways=2)
    >>> layouts = lay_out(reading, chosen, mesh, {})

Traffic follows from the layouts alone. The split axis needs the all-reduce that the walk noted; both matrices are
gathered over `fsdp` where they are used, and their gradients scattered:

    >>> for one in predict_collectives(reading, chosen, layouts, mesh):
    ...     print(f"{one.count} {one.kind} over {one.axis}: {one.bytes:,} bytes")
    1 all-reduce over tensor: 4,096 bytes
    2 all-gather over fsdp: 32,768 bytes
    2 reduce-scatter over fsdp: 16,384 bytes

Memory needs the gradient's program, every array of it with its split and its lifetime. An eighth of 131,072 bytes of
parameters is 16,384, twice that are two moments of them; half of x is 4,096:

    >>> from redco_cli.sharding import derive
    >>> from redco_cli.sharding.predict.memory import StepConfig, TracedLoss, estimate
    >>> plan = derive(loss_fn, params, batch, mesh)
    >>> moments = {"mu": params, "nu": params}
    >>> memory = estimate(TracedLoss(loss_fn, params, batch), moments, mesh, plan.specs, plan.gathered, StepConfig())
    >>> memory.parameters, memory.gradients, memory.optimizer, memory.batch
    (16384, 16384, 32768, 4096)

Start at `collectives` for the traffic. For memory at `memory`, which calls in this order: `flat` (the program as a list
of `operations`), `propagate` (how each array is split; `splits`), `liveness` (from when to when it exists, after
`fusion`; as `timelines`), `peak` (how many bytes exist at each time). `kinds`, `dots` and `kernels` know XLA's habits.
Next room: `compiled`.
"""
