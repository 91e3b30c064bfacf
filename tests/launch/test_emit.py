import subprocess

import pytest
import yaml

from redco_cli.errors import UsageError
from redco_cli.launch.emit import submission
from redco_cli.runtime.cluster import Cluster, recognised

COMMAND = ["train", "my recipe.yaml", "train.steps=10"]


def test_a_slurm_script():
    text = submission("slurm", COMMAND, 4, 8)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {
        "#SBATCH --ntasks=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-task=8",
        "#SBATCH --signal=TERM@300",
    } <= set(lines)
    assert "srun redco train 'my recipe.yaml' train.steps=10" in lines
    assert "gpus" not in submission("slurm", COMMAND, 4, None)


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_slurm_script_is_queued_again_only_after_a_signal(code, tmp_path):
    for name, body in {"srun": f"exit {code}", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run(
        ["bash"],
        input=submission("slurm", COMMAND, 2, None),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == code
    assert ran.stdout == ("requeue 77\n" if code == 75 else "")


def test_a_jobset_gives_each_process_what_it_is_recognised_by():
    job = yaml.safe_load(submission("jobset", COMMAND, 4, 8))
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    workers = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (workers["completions"], workers["parallelism"], workers["completionMode"]) == (4, 4, "Indexed")
    container = workers["template"]["spec"]["containers"][0]
    assert container["command"] == ["redco", *COMMAND]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    environ = {one["name"]: one["value"] for one in container["env"]} | {"JOB_COMPLETION_INDEX": "3"}
    name, group = job["metadata"]["name"], job["spec"]["replicatedJobs"][0]["name"]
    assert recognised(environ) == Cluster("Kubernetes", f"{name}-{group}-0-0.{name}:8476", 4, 3, None)
    assert "resources" not in submission("jobset", COMMAND, 4, None)


@pytest.mark.parametrize(("command", "problem"), [([], "no command is given"), (["init"], "init is not for several")])
def test_what_several_processes_cannot_do_is_refused(command, problem):
    with pytest.raises(UsageError, match=problem):
        submission("slurm", command, 2, None)
