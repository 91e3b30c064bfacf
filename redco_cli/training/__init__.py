"""Training: the step, its state, the loop around it, evaluation, checkpoints and records.

In: a `Job` (recipe, plugin, model, data) and its `Placement` on devices. Out: a trained state, saved as
`checkpoint-<step>/`, and records in `metrics.jsonl`, all in the run's output directory.

Start with `step`: one pure optimizer step over micro-batches, with `state` (what it reads and returns) and
`optimizer` (schedule and optax transformation). `loop` calls it, fed by `input_pipeline`; `timeline` says when to
evaluate, log and save; `evaluate` takes the mean over every example once; `nonfinite` decides about steps that are
skipped. `session` opens and closes a run, which is made of what `setup` lists; `outer_loop` hands it to a plugin's
`run_fn`. `saving/` is about checkpoints and resuming, `records/` about metrics, plots and trackers,
`cuts/` about losses that depend on how a batch is cut into micro-batches.
"""
