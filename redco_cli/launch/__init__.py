"""`redco launch`: one command as several processes, on this machine or by a scheduler.

In: a command such as `train recipe.yaml` and a number of processes. Out: the exit code of the processes (`local`), or
the text of a file to submit: a Slurm batch script or a Kubernetes JobSet (`emit`). Imports no JAX.

Start with `local.launch`: it sets the variables that `runtime.peers.cluster` reads, starts the processes, passes on
signals and output (`output`), and ends all when one fails. `orphan` runs in each of them, for when it dies itself.
"""
