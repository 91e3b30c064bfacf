import pytest

from redco_cli.errors import UsageError
from redco_cli.runtime.peers.cluster import Cluster, detect_cluster, timeout

PLAIN = {"REDCO_NUM_PROCESSES": "4", "REDCO_PROCESS_ID": "1", "REDCO_COORDINATOR": "host0:1234"}
SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0,t1"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "first:99"}


@pytest.mark.parametrize(
    ("environ", "cluster"),
    [
        (PLAIN, Cluster("REDCO variables", "host0:1234", 4, 1, None)),
        (
            {"REDCO_NUM_PROCESSES": "4", "REDCO_COORDINATOR": "job-0.job:8476", "JOB_COMPLETION_INDEX": "3"},
            Cluster("Kubernetes", "job-0.job:8476", 4, 3, None),
        ),
        (SLURM, Cluster("Slurm", "gpu007:63440", 4, 2, None)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, Cluster("Slurm", "gpu007:63440", 4, 2, 2)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "4"}, Cluster("Slurm", "gpu007:63440", 4, 2, None)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, Cluster("Slurm", "localhost:63440", 4, 2, None)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_HET_SIZE": "2"}, Cluster("Slurm", "gpu007:63440", 4, 2, None)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Cluster("Open MPI", "10.96.0.1:65280", 4, 3, None)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Cluster("Open MPI", "localhost:65280", 4, 3, None)),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_orte_hnp_uri": ""},
            Cluster("Open MPI", "localhost:8476", 4, 3, None),
        ),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fd00::2]:34911"},
            Cluster("Open MPI", "[fd00::2]:65280", 4, 3, None),
        ),
        (SLURM | OPEN_MPI, Cluster("Open MPI", "10.96.0.1:65280", 4, 3, None)),
        (SLURM | PLAIN, Cluster("REDCO variables", "host0:1234", 4, 1, None)),
        (SLURM | {"REDCO_COORDINATOR": "[::1]:77"}, Cluster("Slurm", "[::1]:77", 4, 2, None)),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"},
            Cluster("MPI", "localhost:8476", 2, 0, None),
        ),
        (TPU, Cluster("TPU", "t0:8476", 2, 1, None)),
        (TPU | SLICES, Cluster("TPU", "first:8476", 4, 3, None)),
        (
            PLAIN | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            Cluster("REDCO variables", "host0:1234", 4, 1, 4),
        ),
        ({}, None),
        (SLURM | {"REDCO_NUM_PROCESSES": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "1000", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the batch script itself
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # jobs that have nothing to do with each other
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_what_started_the_processes_is_recognised(environ, cluster):
    assert detect_cluster(environ) == cluster


def test_it_is_told_in_one_line():
    assert str(detect_cluster(PLAIN)) == "process 1 of 4, coordinator host0:1234 (REDCO variables)"
    assert (detect_cluster(PLAIN).host, detect_cluster(PLAIN).port) == ("host0", 1234)
    assert detect_cluster(PLAIN | {"REDCO_COORDINATOR": "[::1]:77"}).host == "::1"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"REDCO_NUM_PROCESSES": "4"},
            "environment REDCO_PROCESS_ID: is not set, but REDCO_NUM_PROCESSES is\n"
            "  -> set REDCO_NUM_PROCESSES, REDCO_PROCESS_ID and REDCO_COORDINATOR for every process, or none of them",
        ),
        (
            PLAIN | {"REDCO_PROCESS_ID": "4"},
            "environment REDCO_PROCESS_ID: process 4 cannot be one of 4 processes\n  -> number them from 0 to 3",
        ),
        (
            PLAIN | {"REDCO_COORDINATOR": "host0"},
            "environment REDCO_COORDINATOR: host0 is no address of the form host:port\n"
            "  -> such as host0:8476; the port after it is used too",
        ),
        (
            PLAIN | {"REDCO_NUM_PROCESSES": "four"},
            "environment REDCO_NUM_PROCESSES: 'four' is no whole number\n  -> correct or unset it",
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            "environment: MPI started 2 processes, but does not say where process 0 is\n"
            "  -> set REDCO_COORDINATOR=host:port to the address of process 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(environ, text):
    with pytest.raises(UsageError) as refused:
        detect_cluster(environ)
    assert str(refused.value) == text


def test_the_time_out():
    assert timeout({}) == 300
    assert timeout({"REDCO_TIMEOUT": "2.5"}) == 2.5
    for text in ("0", "-1", "soon", ""):
        with pytest.raises(UsageError, match="is no number of seconds"):
            timeout({"REDCO_TIMEOUT": text})
