"""Kernels that compute a part of a model better than what the compiler makes of its formula.

A kernel comes in where a model asks whether it can run for the devices that a program is for, and goes out as the
same numbers: every one has a plain form beside it, by which the sharding reads it and tests compare it. Start with
`choice`; `splash` is attention on TPUs, `flash` on GPUs.
"""
