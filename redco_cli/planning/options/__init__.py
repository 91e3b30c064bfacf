"""The ways to run a workload on some devices: every mesh, remat and micro-batch, with memory and estimated time.

In: a workload and devices. Out: the best few ways, each with its plan and its figures. Nothing is compiled.

Start with `planner`, which reads a workload once and estimates one way; `search` finds the best few.
"""
