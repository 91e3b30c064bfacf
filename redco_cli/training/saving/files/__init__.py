"""The files of a checkpoint: what orbax and the disk ask for.

In go a directory and trees of arrays; out come the same trees, or an error that says which file is damaged. It knows
nothing of runs: start with `items`, for what is in one checkpoint, and `integrity`, for whether it is whole.
"""
