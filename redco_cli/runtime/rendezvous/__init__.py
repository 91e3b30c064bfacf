"""All processes meet before JAX starts: a wrong count or a missing process is named on each, where JAX would hang.

In: a `Cluster` (who there is, by the environment), the secret of the run, and what all must have alike: recipe,
versions, devices (`facts`). Out: JAX started over all processes and a `peers.connection.Connection`, or a `RedcoError`
that says who is missing or differs.

Start with `join.joined`, the context in which the commands run; at its end the processes part, in peace or with a
reason. `server` is process 0's side, which stays for the whole run, behind a `gate` that only those with the secret
come through; `client` is every process's side of the meeting, `refusals` what can keep them from beginning. `relay`
keeps JAX from ending a process with a stack trace when process 0 is gone.
"""
