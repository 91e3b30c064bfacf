"""The files by which a scheduler starts a run on many machines: a Slurm batch script, a Kubernetes JobSet."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Literal

from redco_cli.errors import EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, UsageError
from redco_cli.launch.local import check_command
from redco_cli.recipe.redaction import name_of, shown_override, variable_of
from redco_cli.runtime.peers.cluster import COORDINATOR, PROCESSES, TIMEOUT, timeout
from redco_cli.runtime.peers.secret import SECRET, new_secret

Scheduler = Literal["slurm", "jobset"]
_TIMEOUT = int(timeout({}))  # seconds after which a run that was asked to stop ends without saving
_GRACE = _TIMEOUT + 120  # seconds between the signal to save and the end: the longest stop, and what comes after it
_PORT = 8476
_OVERRIDE = re.compile(r"[\w.-]+=|plugin\b")  # no prompt, which may speak of secrets
_WORK = "/work"  # where the shared volume of a JobSet is mounted

_SLURM = """\
#!/bin/bash
#SBATCH --job-name=redco
#SBATCH --ntasks={processes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --requeue
#SBATCH --open-mode=append
# So many seconds before the end of its time, the run is asked to save, and exits with {requeue}. A stop takes up to
# {timeout_name}, {timeout} seconds unless you set it; the rest is for the lines below. Raise both together.
#SBATCH --signal=TERM@{grace}

# A secret of this start, by which its processes know each other: in no file, and handed on by srun.
{secret_name}=${{{secret_name}:-$(od -An -N32 -tx1 /dev/urandom | tr -dc 0-9a-f)}}
export {secret_name}

srun --export=ALL {command}
code=$?
if [ "$code" -eq {requeue} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

_JOBSET = """\
# By this secret, which is made anew for each such file, the processes of the run know each other: keep the file to
# those who may take part in it.
apiVersion: v1
kind: Secret
metadata:
  name: redco-secret
type: Opaque
stringData:
  {secret_name}: {secret}
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: redco
spec:
  # A run that is started again continues. It is started again after a request to end (exit code {requeue}), a killed
  # process, a lost node, and a failure (exit code {failed}): with that code all end when one of them is gone. Only a
  # command that cannot work (exit code {usage}) is not tried again. An invalid recipe is a failure: `redco validate`
  # tells before. Raise maxRestarts where nodes are taken away more often.
  failurePolicy:
    maxRestarts: 10
    rules:
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {processes}
          parallelism: {processes}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {{containerName: redco, operator: In, values: [{usage}]}}
          template:
            spec:
              restartPolicy: Never
              # A stop takes up to {timeout_name}, {timeout} seconds unless you set it: raise both together.
              terminationGracePeriodSeconds: {grace}
              # What a pod writes elsewhere is lost with it, and no other pod sees it. So output_dir must be on this
              # volume, or nothing continues. A relative one is, and a relative recipe is looked for there too.
              volumes:
                - name: work
                  persistentVolumeClaim:
                    claimName: REPLACE-WITH-A-READWRITEMANY-CLAIM-THAT-HOLDS-THE-RECIPE
              containers:
                - name: redco
                  image: REPLACE-WITH-AN-IMAGE-THAT-HOLDS-REDCO
                  workingDir: {work}
                  volumeMounts:
                    - {{name: work, mountPath: {work}}}
                  command: {command}
                  env:
                    - {{name: {names[0]}, value: "{processes}"}}
                    - {{name: {names[1]}, value: "redco-workers-0-0.redco:{port}"}}
                    - {{name: {secret_name}, valueFrom: {{secretKeyRef: {{name: redco-secret, key: {secret_name}}}}}}}
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
        UsageError: the command is not for several processes, or holds a secret.
    """
    check_command(command)
    _refuse_secrets(command)
    words = ["redco", *command]
    shared = {
        "processes": processes,
        "grace": _GRACE,
        "timeout": _TIMEOUT,
        "timeout_name": TIMEOUT,
        "requeue": EXIT_REQUEUE,
        "secret_name": SECRET,
    }
    if scheduler == "slurm":
        gpus = "" if devices is None else f"#SBATCH --gpus-per-task={devices}\n"
        return _SLURM.format(devices=gpus, command=shlex.join(words), **shared)
    return _JOBSET.format(
        devices="" if devices is None else _JOBSET_DEVICES.format(devices=devices),
        command=json.dumps(words),
        names=(PROCESSES, COORDINATOR),
        secret=json.dumps(new_secret()),
        port=_PORT,
        failed=EXIT_FAILED,
        usage=EXIT_USAGE,
        work=_WORK,
        **shared,
    )


def _refuse_secrets(command: Sequence[str]) -> None:
    """A file to submit is kept and shared."""
    for argument in command:
        if _OVERRIDE.match(argument) and shown_override(argument) != argument:
            key = name_of(argument)
            parent, _, name = key.rpartition(".")
            lost = key != key.lower() or "-" in key  # the name of a variable keeps neither
            variable = f"{variable_of(parent)}='{{{name}: ...}}'" if lost else variable_of(key)
            remedy = f"leave it out, and set {variable} in the environment of the job, from where you keep secrets"
            raise UsageError(f"command line: {key}", "is a secret, and would be in the file", remedy)
