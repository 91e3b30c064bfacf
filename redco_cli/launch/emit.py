"""The files by which a scheduler starts a run on many machines: a Slurm batch script, a Kubernetes JobSet."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Literal

from redco_cli.errors import EXIT_REQUEUE
from redco_cli.launch.local import check_command
from redco_cli.runtime.cluster import COORDINATOR, PROCESSES

Scheduler = Literal["slurm", "jobset"]
_GRACE = 300  # seconds between the signal to save and the end
_PORT = 8476

_SLURM = """\
#!/bin/bash
#SBATCH --job-name=redco
#SBATCH --ntasks={processes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --requeue
#SBATCH --open-mode=append
# So many seconds before the end of its time, the run is asked to save, and exits with {requeue}.
#SBATCH --signal=TERM@{grace}

srun {command}
code=$?
if [ "$code" -eq {requeue} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: redco
spec:
  failurePolicy:
    maxRestarts: 100  # a run that is started again continues
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {processes}
          parallelism: {processes}
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace}
              containers:
                - name: redco
                  image: REPLACE-WITH-AN-IMAGE-THAT-HOLDS-REDCO-AND-THE-RECIPE
                  command: {command}
                  env:
                    - {{name: {names[0]}, value: "{processes}"}}
                    - {{name: {names[1]}, value: "redco-workers-0-0.redco:{port}"}}
{devices}"""

_JOBSET_DEVICES = """\
                  resources:
                    limits: {{nvidia.com/gpu: {devices}}}
"""


def submission(scheduler: Scheduler, command: Sequence[str], processes: int, devices: int | None) -> str:
    """The file to submit: `sbatch FILE` or `kubectl apply -f FILE`.

    Args:
        scheduler: for which.
        command: such as `["train", "recipe.yaml"]`.
        processes: machines, each with one process.
        devices: GPUs of each; None leaves them to the scheduler.

    Raises:
        UsageError: the command is not for several processes.
    """
    check_command(command)
    words = ["redco", *command]
    if scheduler == "slurm":
        gpus = "" if devices is None else f"#SBATCH --gpus-per-task={devices}\n"
        return _SLURM.format(
            processes=processes, devices=gpus, grace=_GRACE, requeue=EXIT_REQUEUE, command=shlex.join(words)
        )
    gpus = "" if devices is None else _JOBSET_DEVICES.format(devices=devices)
    return _JOBSET.format(
        processes=processes,
        devices=gpus,
        grace=_GRACE,
        command=json.dumps(words),
        names=(PROCESSES, COORDINATOR),
        port=_PORT,
    )
