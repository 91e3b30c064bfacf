"""The search among all ways to run a workload on some devices: every mesh, remat and micro-batch.

In: a workload and devices. Out: the best few ways, each with its plan, memory and estimated time (`planning.options`).

Start with `ways`; `remedies` searches among more devices, or less memory, for what would make a step fit that does not.
"""
