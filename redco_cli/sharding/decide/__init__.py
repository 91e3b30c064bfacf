"""Decides where each parameter lives: from logical axes and the sizes of a mesh to layouts with reasons.

In: a `Reading` of a program, the mesh, and what the user overrides. Out: a `Layout` for every parameter: the mesh axes
that each dim is stored over, those it is used over once gathered, and the reason in the model's terms.

    >>> from redco_cli.sharding.decide.choose import candidates, choose
    >>> from redco_cli.sharding.decide.layout import lay_out
    >>> from redco_cli.sharding.example import batch, loss_fn, mesh, params
    >>> from redco_cli.sharding.program.reading import read
    >>> reading = read(loss_fn, params, batch)

`choose` takes the axes that are cheapest to split over `tensor` for the parameter bytes they divide. The 256 features
between the matmuls cost one all-reduce of [32/2, 64] floats and divide both matrices; the 64 outputs cost more and
divide only `down`, whose other dim is taken by then:

    >>> every = candidates(reading, tensor=mesh["tensor"], batch_ways=mesh["data"] * mesh["fsdp"])
    >>> for one in every:
    ...     print([axis.size for axis in one.chain], f"moves {one.cost:,.0f} bytes a step, divides {one.value:,}")
    [256] moves 4,096 bytes a step, divides 131,072
    [64] moves 16,388 bytes a step, divides 65,536
    >>> chosen = choose(reading, tensor=mesh["tensor"], batch_ways=mesh["data"] * mesh["fsdp"])
    >>> [[axis.size for axis in one.chain] for one in chosen]
    [[256]]

`lay_out` splits the parameters that have a chosen axis there, and the first dim that divides over `fsdp`:

    >>> for parameter, layout in zip(reading.parameters, lay_out(reading, chosen, mesh, {})):
    ...     print(parameter.path, layout.stored, layout.gathered, layout.reason)
    down (('tensor', 'fsdp'), ()) (('tensor',), ()) rows: sums over 256 features, 64 on each device
    up (('fsdp',), ('tensor',)) ((), ('tensor',)) columns: makes 256 features, 64 on each device

Start at `choose` (rules one and two), then `layout` (each parameter gets the first rule that applies, and is `placed`
so), `projections` (several in one weight), `pieces` (weights that are taken apart), `tables` (of which rows move),
`override` (what the user says instead), `guards` (nothing large is whole everywhere in silence) and `follow` (optimizer
state lies as its parameter does). Next room: `predict`.
"""
