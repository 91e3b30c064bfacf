"""The real train step compiled for devices that are not there: TPUs and GPUs, on any machine.

In: a way to run a workload, and a `chips.Target`. Out: what the compiler of that target says of its memory, its
collectives and its kernels. XLA needs no such device to compile for one; it needs its plugin (`redco[tpu]`,
`redco[cuda]`), and a process of its own, which holds no other platform.

How long a step takes there is reckoned too (`speed`): by a walk over what was compiled (`seconds`), or over the plan in
the same form (`roofline`).

Start at `compile`, which starts that process; `child` is what runs there, on `deviceless` devices. Programs for TPUs
are compiled up to their schedule (`scheduled`), which is all that is read of them.
"""
