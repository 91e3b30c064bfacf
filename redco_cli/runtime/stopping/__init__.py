"""Ending a run by a signal: SIGINT, SIGTERM, SIGUSR1 or SIGHUP to any process, and all save at the same step.

In: signals. Out: a `StopRequest` that the training loop asks after each step, and `Stopped`, raised between two batches
of evaluation or prediction; then exit code 75 (requeue) or 130 (Ctrl-C).

Start with the docstring of `signals`: how processes agree on where to stop. `deadline` asks as a signal does once the
time of a run is over. `handlers` sets signal handlers for a while
and keeps forked children from inheriting them.
"""
