import re
import signal
import subprocess

import pytest
import yaml

from redco_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REQUEUE, EXIT_USAGE, UsageError
from redco_cli.launch.emit import submission
from redco_cli.runtime.peers.cluster import Cluster, detect_cluster, timeout
from redco_cli.runtime.peers.secret import find_secret

COMMAND = ["train", "my recipe.yaml", "train.steps=10"]
MARGIN = 90  # seconds: Slurm sends a signal up to 60 s early, and what comes after a stop takes some as well


def jobset(devices=8):
    """The JobSet, and the Job that it makes."""
    _, whole = yaml.safe_load_all(submission("jobset", COMMAND, 4, devices))
    return whole, whole["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_a_slurm_script():
    text = submission("slurm", COMMAND, 4, 8)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {
        "#SBATCH --ntasks=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-task=8",
    } <= set(lines)
    assert "srun --export=ALL redco train 'my recipe.yaml' train.steps=10" in lines
    assert "gpus" not in submission("slurm", COMMAND, 4, None)


def test_the_longest_stop_ends_before_the_scheduler_ends_the_run():
    (grace,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", submission("slurm", COMMAND, 4, 8), re.MULTILINE)
    pod = jobset()[1]["template"]["spec"]
    assert min(int(grace), pod["terminationGracePeriodSeconds"]) >= timeout({}) + MARGIN


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


def start_of(script, path, tasks, **environ):
    """What each task of a Slurm script finds as the secret, at one start of it."""
    (path / "srun").write_text(
        f'#!/bin/bash\necho "$@" > {path}/argv\nfor n in {tasks}; do printenv REDCO_SECRET; done\n'
    )
    (path / "srun").chmod(0o755)
    ran = subprocess.run(
        ["bash"],
        input=script,
        env={"PATH": f"{path}:/usr/bin:/bin", "SLURM_JOB_ID": "77", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.split()


def test_each_start_of_a_slurm_script_has_a_secret_of_its_own(tmp_path):
    script = submission("slurm", COMMAND, 2, None)
    starts = [start_of(script, tmp_path, "1 2 3") for _ in range(2)]
    for found in starts:
        assert len(found) == 3
        assert re.fullmatch("[0-9a-f]{64}", found[0])
        assert len(set(found)) == 1
        assert found[0] not in script
        assert found[0] not in (tmp_path / "argv").read_text()  # which anyone on the machine may read
    assert starts[0] != starts[1]
    assert start_of(script, tmp_path, "1", REDCO_SECRET="of the user's own") == ["of", "the", "user's", "own"]


def test_the_pods_of_a_jobset_have_one_secret_by_reference():
    texts = [submission("jobset", COMMAND, 2, None) for _ in range(2)]
    values = set()
    for text in texts:
        secret, job = yaml.safe_load_all(text)
        assert (secret["apiVersion"], secret["kind"], secret["type"]) == ("v1", "Secret", "Opaque")
        ((key, value),) = secret["stringData"].items()
        assert find_secret({key: value}, "node1") == value.encode()
        assert text.count(value) == 1
        pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert {
            "name": key,
            "valueFrom": {"secretKeyRef": {"name": secret["metadata"]["name"], "key": key}},
        } in pod["containers"][0]["env"]
        values.add(value)
    assert len(values) == 2


def test_a_jobset_gives_each_process_what_it_is_recognised_by():
    job, workers = jobset()
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (workers["completions"], workers["parallelism"], workers["completionMode"]) == (4, 4, "Indexed")
    container = workers["template"]["spec"]["containers"][0]
    assert container["command"] == ["redco", *COMMAND]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    environ = {one["name"]: one.get("value") for one in container["env"]} | {"JOB_COMPLETION_INDEX": "3"}
    name, group = job["metadata"]["name"], job["spec"]["replicatedJobs"][0]["name"]
    assert detect_cluster(environ) == Cluster("Kubernetes", f"{name}-{group}-0-0.{name}:8476", 4, 3, None)
    assert "resources" not in jobset(None)[1]["template"]["spec"]["containers"][0]


def test_all_pods_of_a_jobset_work_on_one_volume_that_outlives_them():
    pod = jobset()[1]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert set(volume) == {"name", "persistentVolumeClaim"}
    assert volume["persistentVolumeClaim"]["claimName"].startswith("REPLACE-WITH-A-READWRITEMANY-CLAIM")
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": container["workingDir"]}]
    assert container["image"].startswith("REPLACE-WITH-")


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (EXIT_USAGE, False),
        (EXIT_FAILED, True),  # so do the others end when one process is gone
        (EXIT_REQUEUE, True),
        (EXIT_INTERRUPTED, True),
        (128 + signal.SIGKILL, True),
        (128 + signal.SIGTERM, True),
        (128 + signal.SIGABRT, True),
    ],
)
def test_a_jobset_is_restarted_whatever_happens_but_not_when_its_command_cannot_work(code, again):
    whole, job = jobset()
    reason = "BackoffLimitExceeded"  # of the job, once a pod failed and no rule spoke of it
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        assert (rule["action"], codes["operator"]) == ("FailJob", "In")
        assert codes["containerName"] in [container["name"] for container in job["template"]["spec"]["containers"]]
        if code in codes["values"]:
            reason = "PodFailurePolicy"
    policy = whole["spec"]["failurePolicy"]
    actions = [rule["action"] for rule in policy["rules"] if reason in rule["onJobFailureReasons"]]
    assert (actions or ["RestartJobSet"]) == (["RestartJobSet"] if again else ["FailJobSet"])
    assert policy["maxRestarts"] == 10


def test_a_jobset_is_such_that_kubernetes_takes_its_rules():
    job = jobset()[1]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy is refused with any other
    assert job["backoffLimit"] == 0  # one pod that failed fails the job: the others cannot go on without it


@pytest.mark.parametrize(("command", "problem"), [([], "no command is given"), (["init"], "init is not for several")])
def test_what_several_processes_cannot_do_is_refused(command, problem):
    with pytest.raises(UsageError, match=problem):
        submission("slurm", command, 2, None)


@pytest.mark.parametrize(
    "argument",
    [
        "secret: what is it?",
        "Key: what is the capital?",
        "predict.generation.max_new_tokens=512",
        "plugin.options.max_tokens=5",
        "plugin.options.tokens=5",
        "models.token.name=gpt2",
    ],
)
def test_what_only_speaks_of_secrets_is_none(argument):
    assert argument in submission("slurm", ["predict", "x", "--prompt", argument], 2, None)


@pytest.mark.parametrize("scheduler", ["slurm", "jobset"])
def test_a_secret_is_not_written_to_a_file_to_submit(scheduler):
    with pytest.raises(UsageError) as caught:
        submission(scheduler, [*COMMAND, "plugin.options.api_key=s3cr3t"], 2, None)
    assert str(caught.value) == (
        "command line: plugin.options.api_key: is a secret, and would be in the file\n"
        "  -> leave it out, and set REDCO_PLUGIN__OPTIONS__API_KEY in the environment of the job, from where you "
        "keep secrets"
    )


@pytest.mark.parametrize(
    ("argument", "key", "variable"),
    [
        ("plugin.options.api_key: s3cr3t", "plugin.options.api_key", "REDCO_PLUGIN__OPTIONS__API_KEY"),
        ("plugin.options={api_key: s3cr3t}", "plugin.options", "REDCO_PLUGIN__OPTIONS"),
        ("plugin.options.servers=[{token: s3cr3t}]", "plugin.options.servers", "REDCO_PLUGIN__OPTIONS__SERVERS"),
        ("plugin.options.hfToken=s3cr3t", "plugin.options.hfToken", "REDCO_PLUGIN__OPTIONS='{hfToken: ...}'"),
        ("plugin.options.db-pwd=12345", "plugin.options.db-pwd", "REDCO_PLUGIN__OPTIONS='{db-pwd: ...}'"),
    ],
)
def test_a_secret_is_refused_however_it_is_written(argument, key, variable):
    with pytest.raises(UsageError) as caught:
        submission("slurm", [*COMMAND, argument], 2, None)
    said = str(caught.value)
    assert said.startswith(f"command line: {key}: is a secret, and would be in the file\n")
    assert f" set {variable} in the environment" in said
    assert "s3cr3t" not in said
    assert "12345" not in said
