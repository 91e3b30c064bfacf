"""Devices and processes: how a run gets hold of them, and how it lets go of them.

In: the devices that JAX finds, the environment of a process, signals. Out: a `Mesh` and arrays on it (`mesh`), compiled
functions that announce when they compile (`program`), processes that have met and agree (`rendezvous`), know each other
(`peers`), and stop together (`stopping`).

Start with `mesh`. Small things beside: `cache` of compiled programs, `disk` (can this be written?), `lease` (who owns a
directory?), `doctor` (what this machine offers), `platforms` (what JAX looks for). For users of several hosts:
README.md in this folder.
"""
