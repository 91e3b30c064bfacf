"""What a recipe or a model will do on some devices, before it does it: nothing is allocated, no device is needed.

In: a job, a recipe or a model's config, a number of devices and their memory. Out: the mesh, remat and micro-batch to
run with (`choice`), the report of `redco inspect-sharding` (`inspect`, as data in `report`, drawn by `console.plan` and
`picture`), the summary of `redco validate` (`validate`), and what to change when memory ran out (`out_of_memory`).

Start with `workload`, one train step in the abstract, then `options`: one way to run it with its memory and estimated
time, and `search`, which finds the best for `choice` and `inspect`. `compiled` compiles the step, to compare;
`parameter_groups` folds parameters that are alike into one row; `arguments` reads sizes and meshes from the command
line.
"""
