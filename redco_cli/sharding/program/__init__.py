"""Reads a program: from its jaxpr to the logical axes of its parameters.

In: a function and the shapes of its arguments. Out: a `Reading`: for every dim of every parameter its *logical axes*
(what the dim means: one MLP's width, one attention's heads), the matmuls by which they meet, and the collectives that
would be needed if an axis were split. No mesh plays a part.

    >>> from redco_cli.sharding.axes import factors, size
    >>> from redco_cli.sharding.example import batch, loss_fn, params
    >>> from redco_cli.sharding.program.reading import read
    >>> reading = read(loss_fn, params, batch)
    >>> down, up = reading.parameters

Every dim begins as an axis of its own. The walk through the jaxpr unifies those that an operation makes equal: `x @ up`
the width of x with the rows of `up`, `hidden @ down` the columns of `up` (which gelu keeps) with the rows of `down`:

    >>> up.shape, down.shape, up.dims[1] == down.dims[0]
    ((64, 256), (256, 64), True)
    >>> for matmul in (*reading.matmuls["up"], *reading.matmuls["down"]):
    ...     contracted, produced = (sum(map(size, dims)) for dims in (matmul.contracted, matmul.produced))
    ...     print(f"{matmul.path} sums over {contracted} and makes {produced}")
    up sums over 64 and makes 256
    down sums over 256 and makes 64

On its way the walk notes what would have to move if an axis were split. For the axis between the two matmuls that is
the result of the second, [32, 64], whose partial sums the devices would have to add up; gelu moves nothing:

    >>> for one in reading.collectives:
    ...     if up.dims[1] in map(factors, one.if_split):
    ...         print(one.kind, [size(dim) for dim in one.moved], one.what)
    all-reduce [32, 64] partial sums of a matmul

Start at `reading` (the result and how it is put together), then `walk` (through jaxprs that hold jaxprs), `primitives`,
`matrices` and `indexing` (one rule for each primitive), `shard_map` (programs that name mesh axes), `events` (what a
walk notes down), `reference` (kernels that a trace cannot look into), `flops` (what its matrix products take),
`branches` (how often each is taken), `marks` (what a program says of its own arrays), room `rows` (what is looked up by
number), `rewrite` (the other direction: a program run anew, its parameters in another form) with `unevaluated` (results
that wait until they are used). Unification itself is in `redco_cli.sharding.axes`. Next room:
`decide`.
"""
