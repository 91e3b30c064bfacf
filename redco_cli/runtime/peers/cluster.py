"""Which processes a run has, and which of them this one is: read from the environment. Imports no JAX.

Recognised, the first that fits: plain variables (`REDCO_NUM_PROCESSES`, `REDCO_PROCESS_ID`, `REDCO_COORDINATOR`; an
indexed Kubernetes job or a JobSet gives the id as `JOB_COMPLETION_INDEX`), Open MPI, Slurm, other MPIs by PMI, and
TPU pods.
`REDCO_COORDINATOR` also overrides the address that the others suggest, and `REDCO_NUM_PROCESSES=1` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from redco_cli.errors import UsageError

COORDINATOR, PROCESSES, PROCESS, TIMEOUT = (
    "REDCO_COORDINATOR",
    "REDCO_NUM_PROCESSES",
    "REDCO_PROCESS_ID",
    "REDCO_TIMEOUT",
)
_FIRST_PORT, _PORTS = 61440, 4000  # two neighbouring ports are used: JAX's, and the one after it
_DEFAULT_PORT = 8476
_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
        kind: who started them: `REDCO variables`, `Kubernetes`, `Open MPI`, `Slurm`, `MPI`, `TPU`.
        coordinator: `host:port` of process 0; the port after it is used as well.
        processes: how many there are, at least two.
        process: which one this is, from 0.
        local_devices: devices of this process where the environment says; else None.
    """

    kind: str
    coordinator: str
    processes: int
    process: int
    local_devices: int | None

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes}, coordinator {self.coordinator} ({self.kind})"

    @property
    def host(self) -> str:
        """Of the coordinator, without brackets."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Of the coordinator."""
        return int(self.coordinator.rpartition(":")[2])


def detect_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """The processes that the environment speaks of; None for a process alone.

    Raises:
        UsageError: what it says is incomplete, or cannot be.
    """
    if environ.get(PROCESSES) == "1":
        return None
    found = next((found for read in _READERS if (found := read(environ)) is not None), None)
    if found is None or found[1] == 1:
        return None
    kind, processes, process, suggested = found
    coordinator = environ.get(COORDINATOR) or suggested
    if not coordinator:
        problem = f"{kind} started {processes} processes, but does not say where process 0 is"
        raise UsageError("environment", problem, f"set {COORDINATOR}=host:port to the address of process 0")
    if re.fullmatch(r"(\[[^]]+\]|[^:]+):\d{1,5}", coordinator) is None or not 0 < _port(coordinator) < 65535:
        problem = f"{coordinator} is no address of the form host:port"
        raise UsageError(f"environment {COORDINATOR}", problem, "such as host0:8476; the port after it is used too")
    if not 0 <= process < processes:
        problem = f"process {process} cannot be one of {processes} processes"
        raise UsageError(f"environment {PROCESS}", problem, f"number them from 0 to {processes - 1}")
    return Cluster(kind, coordinator, processes, process, _devices(environ))


def timeout(environ: Mapping[str, str]) -> float:
    """Seconds within which all processes must have met, and a run asked to stop must end: `REDCO_TIMEOUT`, else 300.

    Raises:
        UsageError: it is no positive number.
    """
    text = environ.get(TIMEOUT, "300")
    if re.fullmatch(r"\d+(\.\d+)?", text) is None or not float(text):
        raise UsageError(f"environment {TIMEOUT}", f"{text!r} is no number of seconds", "such as 300")
    return float(text)


Found = tuple[str, int, int, str]
"""Kind, processes, process, suggested coordinator or nothing."""


def _plain(environ: Mapping[str, str]) -> Found | None:
    if not {PROCESSES, PROCESS} & environ.keys():
        return None
    index, kind = PROCESS, "REDCO variables"
    if PROCESS not in environ and "JOB_COMPLETION_INDEX" in environ:
        index, kind = "JOB_COMPLETION_INDEX", "Kubernetes"
    missing = next((name for name in (PROCESSES, index, COORDINATOR) if not environ.get(name)), None)
    if missing is not None:
        given = next(name for name in (PROCESSES, PROCESS) if name in environ)
        remedy = f"set {PROCESSES}, {PROCESS} and {COORDINATOR} for every process, or none of them"
        raise UsageError(f"environment {missing}", f"is not set, but {given} is", remedy)
    return kind, _number(environ, PROCESSES), _number(environ, index), ""


def _open_mpi(environ: Mapping[str, str]) -> Found | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    processes, process = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job, address = re.match(r"\d+", uri), re.search(r"tcp://([^:,]+)|tcp6://\[([^],]+)", uri)
    port = _chosen_port(int(job[0]) // 4096) if job is not None else _DEFAULT_PORT
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(processes):
        return "Open MPI", processes, process, f"localhost:{port}"
    host = "" if address is None else address[1] or f"[{address[2]}]"
    return "Open MPI", processes, process, f"{host}:{port}" if host else ""


def _slurm(environ: Mapping[str, str]) -> Found | None:
    # A batch script has SLURM_NTASKS too, but only what srun starts is a task of a step.
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environ.keys():
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    port = _chosen_port(_number(environ, "SLURM_JOB_ID"))
    # In a heterogeneous job the variables may speak of one of its components only.
    alone = environ.get("SLURM_STEP_NUM_NODES") == "1" and "SLURM_HET_SIZE" not in environ
    host = "localhost" if alone else first_host(environ["SLURM_STEP_NODELIST"])
    return "Slurm", _number(environ, tasks), _number(environ, "SLURM_PROCID"), f"{host}:{port}"


def _pmi(environ: Mapping[str, str]) -> Found | None:
    if not {"PMI_SIZE", "PMI_RANK"} <= environ.keys():
        return None
    processes = _number(environ, "PMI_SIZE")
    alone = environ.get("MPI_LOCALNRANKS") == str(processes)
    return "MPI", processes, _number(environ, "PMI_RANK"), f"localhost:{_DEFAULT_PORT}" if alone else ""


def _tpu(environ: Mapping[str, str]) -> Found | None:
    if not {"TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"} <= environ.keys():
        return None
    hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
    slices = _number(environ, "MEGASCALE_NUM_SLICES") if environ.get("MEGASCALE_NUM_SLICES") else 1
    number = _number(environ, "MEGASCALE_SLICE_ID") if slices > 1 else 0
    first = environ["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0] if slices > 1 else hosts[0]
    process = number * len(hosts) + _number(environ, "TPU_WORKER_ID")
    return "TPU", slices * len(hosts), process, f"{first}:{_DEFAULT_PORT}"


_READERS: tuple[Callable[[Mapping[str, str]], Found | None], ...] = (_plain, _open_mpi, _slurm, _pmi, _tpu)
"""mpirun within a Slurm job leaves the variables of both, and only its own count the processes: it comes before."""


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-015,020],login1"), first_host("node1,node2"), first_host("rack[1-2]-node[3,4]")
    ('gpu007', 'node1', 'rack1-node3')
    """
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else nodes)


def _chosen_port(job: int) -> int:
    """A port that all processes of a job, and hardly another job on the same host, come to."""
    return _FIRST_PORT + job * 2 % _PORTS


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"environment {name}", f"{text!r} is no whole number", "correct or unset it")
    return int(text)


def _devices(environ: Mapping[str, str]) -> int | None:
    """Devices of this process as far as variables fix them."""
    cpu = _COUNT.search(environ.get("XLA_FLAGS", ""))
    if environ.get("JAX_PLATFORMS") == "cpu":
        return int(cpu[1]) if cpu else None
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return len(visible.split(",")) if visible else None
