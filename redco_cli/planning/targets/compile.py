"""Compiles a step for devices that are not there, in a process of its own, and says meanwhile what that does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from redco_cli.chips.target import Target
from redco_cli.console.waiting import waiting
from redco_cli.errors import DeviceError, Problem
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.sharding.compiled.events import Event, from_json

_BEGIN = "import sys; sys.path[:] = sys.argv[1:]; from redco_cli.planning.targets.child import serve; serve()"
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_SHOWN = 4  # last lines of a process that broke


def compile_for(
    target: Target, option: Option, workload: Mapping[str, Any], *, cycles: bool = False
) -> tuple[Compiled, tuple[Event, ...] | None]:
    """One train step of a way to run a workload, as the compiler of a target makes it.

    Args:
        target: the devices; none of them need be there.
        option: the way; its mesh has as many devices.
        workload: the arguments of `find_workload` that the way comes from.
        cycles: compile for a TPU to the end, which takes minutes, and not up to the schedule.

    Returns:
        What the compiler says, and what happens in the program; None where its memory does not suffice.

    Raises:
        DeviceError: JAX cannot compile for them here.
    """
    request = {
        "target": str(target),
        "workload": workload,
        "remat": option.workload.remat,
        "mesh": dict(option.plan.mesh),
        "micro_batch_size": option.micro_batch_size,
        "reshard_after_forward": option.reshard_after_forward,
        "options": dict(option.workload.xla),
        "cycles": cycles,
    }
    ended = _ended(request, target)
    if "problems" in ended:
        raise DeviceError.of([Problem(*one) for one in ended["problems"]])
    return as_compiled(ended, target)


def as_compiled(ended: Mapping[str, Any], target: Target) -> tuple[Compiled, tuple[Event, ...] | None]:
    """What the compiler said of a step, and what happens in it; see `compile_for`.

    Args:
        ended: as `child.compile_lowered` says it.
        target: the devices.
    """
    if "too_large" in ended:
        needed, said = (ended["too_large"][key] for key in ("needed", "said"))
        return Compiled(needed, (), 0.0, None, 0, (), 0, (), str(target), said), None
    found: Compiled = TypeAdapter(Compiled).validate_python(ended["compiled"])
    return dataclasses.replace(found, target=str(target)), from_json(ended["timeline"])


def _ended(request: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """What the process says at its end."""
    with tempfile.TemporaryFile("w+") as said, waiting() as tell:
        with subprocess.Popen(  # noqa: S603 - nothing of it is from outside
            [sys.executable, "-c", _BEGIN, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(request))
                process.stdin.close()
                for line in process.stdout:
                    message: dict[str, Any] = json.loads(line)
                    if "stage" not in message:
                        return message
                    tell(message["stage"])
            finally:
                process.kill()
        code = process.returncode
        said.seek(0)
        last = " | ".join(said.read().splitlines()[-_SHOWN:])
    problem = f"the process that compiles for {target} ended with exit code {code}: {last}"
    raise DeviceError("--compile", problem, "leave --compile out to plan without a compiler")
