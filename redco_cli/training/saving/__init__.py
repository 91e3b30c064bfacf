"""Checkpoints: written while training goes on, checked before they are used, resumed exactly.

In: a `TrainState` and what the run has come to (`Meta`); later an output directory, or the path of a checkpoint. Out:
`checkpoint-<step>/` directories, and where a run starts: at its own checkpoint, at those of another run, or afresh.

Start with `checkpoint`, whose docstring tells the story of a save, then `resume`, which decides where a run starts.
`extension` says how it goes on where its length has changed. `selection` picks the checkpoint that is named, or the
first undamaged one; `parameters` loads parameters alone; `integrity` writes and compares checksums; `ranking` says
which evaluation is best; `owner` holds the output directory, for one run at a time. `state_dict` is the form on disk,
`deletion` removes directories in a thread, `orbax_errors` words what orbax raises. For users: README.md in this folder.
"""
