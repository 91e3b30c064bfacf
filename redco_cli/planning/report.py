"""What a plan says to a person, as data: the parameters in groups, memory, traffic, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from redco_cli.planning.parameter_groups import ParameterGroup, group_parameters
from redco_cli.planning.timing import Constant, Speed, Term
from redco_cli.sharding.compiled.schedule import Written
from redco_cli.sharding.plan import Collective, Plan, Row
from redco_cli.sharding.rings import sent_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device when a step needs most.

    Attributes:
        parameters: its shards of them.
        gradients: of these.
        optimizer: state of the optimizer.
        activations: kept for the backward pass.
        logits: of a language model, with their gradient.
        batch: the examples.
        gathered: parameters put together just where they are used.
        plugin_state: what `init_state` of the plugin made.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    batch: int
    gathered: int
    plugin_state: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to run the model.

    Attributes:
        mesh: axis to size.
        remat: what is recomputed in the backward pass instead of kept.
        micro_batch_size: examples that go through the model at once, on all devices together.
        memory: bytes on one device, all kinds together.
        traffic: bytes that one device receives in a step.
        reason: why it was chosen, or why not.
    """

    mesh: Mapping[str, int]
    remat: str
    micro_batch_size: int
    memory: int
    traffic: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of the same step.

    Attributes:
        memory: bytes on one device; None when the compiler does not say.
        collectives: what the compiled step moves.
        seconds: how long it took to compile.
        overlapped: share of the bytes of its collectives that move while a matrix product or attention runs; None where
            the compiler leaves that order open, as for a CPU.
        host: bytes on the host that belong to one device, such as activations that were offloaded.
        attention: the kernels that compute it; empty where it is made of products.
        launches: how many kernels a step starts.
        largest: arrays that it writes, largest first.
        target: the devices that it was compiled for; None for simulated ones of a CPU.
        too_large: what the compiler says where its memory does not suffice; nothing else is known then.
        changed: the options that had to be changed for it to compile or to fit, and why; None mostly.
    """

    memory: int | None
    collectives: tuple[Collective, ...]
    seconds: float
    overlapped: float | None
    host: int
    attention: tuple[str, ...]
    launches: int
    largest: tuple[Written, ...]
    target: str | None
    too_large: str | None
    changed: str | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """One figure of two plans.

    Attributes:
        name: what it is.
        first: of the plan that is reported.
        second: of the other.
    """

    name: str
    first: float
    second: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two plans side by side.

    Attributes:
        first: the model, mesh and step that are reported.
        second: those of the other.
        first_fits: whether it fits; None where that is not known.
        second_fits: likewise the other.
        seconds: of a step, by what they are spent on, the total last; empty where either has no step time.
        memory: bytes on one device by kind, the total last.
        traffic: bytes of one device in a step by collective and mesh axis, the total last.
    """

    first: str
    second: str
    first_fits: bool | None
    second_fits: bool | None
    seconds: tuple[Difference, ...]
    memory: tuple[Difference, ...]
    traffic: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything `redco inspect-sharding` says.

    Attributes:
        model: its name.
        parameters: how many numbers it has.
        bytes: of them all.
        devices: how many there are.
        chosen: how it runs.
        runners_up: the next best ways, best first.
        global_batch_size: examples in a step.
        seq_length: tokens in an example; None where examples are no tokens.
        dtype: in which it computes.
        target: the devices that it is planned for, where they are named.
        xla: options of XLA's compiler that its step is compiled with.
        groups: of parameters, in the order of the tree.
        state: likewise of the arrays that `init_state` of the plugin made.
        memory: bytes on one device by kind.
        device_memory: bytes that one device has; None when it is not known.
        fits: whether it does in `device_memory`, as compiled for a target or else by plan; None when that is not known.
        remedies: what to change so that it fits, most promising first.
        collectives: what a step moves, predicted.
        warnings: what a user should know before a run.
        compiled: the same step as compiled; None when it was not.
        speed: how fast a step is on the target, by estimate; None without a target, or where the step does not fit.
        comparison: with another mesh or model; None where none was asked for.
    """

    model: str
    parameters: int
    bytes: int
    devices: int
    chosen: Choice
    runners_up: tuple[Choice, ...]
    global_batch_size: int
    seq_length: int | None
    dtype: str
    target: str | None
    xla: Mapping[str, bool | int | float | str]
    groups: tuple[ParameterGroup, ...]
    state: tuple[ParameterGroup, ...]
    memory: Memory
    device_memory: int | None
    fits: bool | None
    remedies: tuple[str, ...]
    collectives: tuple[Collective, ...]
    warnings: tuple[str, ...]
    compiled: Compiled | None
    speed: Speed | None
    comparison: Comparison | None


def build_report(
    plan: Plan,
    *,
    model: str,
    chosen: Choice,
    memory: Memory,
    global_batch_size: int,
    seq_length: int | None,
    dtype: str = "float32",
    target: str | None = None,
    xla: Mapping[str, bool | int | float | str] | None = None,
    device_memory: int | None = None,
    fits: bool | None = None,
    runners_up: Sequence[Choice] = (),
    remedies: Sequence[str] = (),
    compiled: Compiled | None = None,
    speed: Speed | None = None,
    stacked: Mapping[str, int] | None = None,
    state: Sequence[Row] = (),
) -> Report:
    """The report of a plan.

    Args:
        plan: how the parameters are split over the chosen mesh.
        model: name of the model.
        chosen: the mesh and how it runs on it.
        memory: bytes on one device by kind.
        global_batch_size: examples in a step.
        seq_length: tokens in an example; None where examples are no tokens.
        dtype: in which it computes.
        target: the devices that it is planned for, where they are named.
        xla: options of XLA's compiler.
        device_memory: bytes of one device, if known.
        runners_up: the next best ways, best first.
        fits: whether it does; see `remedies.does_fit`.
        remedies: what to change so that it fits.
        compiled: the same step as compiled, if it was.
        speed: how fast a step is, if that can be told.
        stacked: see `group_parameters`.
        state: of the plugin.
    """
    return Report(
        model=model,
        parameters=sum(row.count for row in plan.rows),
        bytes=plan.bytes,
        devices=math.prod(plan.mesh.values()),
        chosen=chosen,
        runners_up=tuple(runners_up),
        global_batch_size=global_batch_size,
        seq_length=seq_length,
        dtype=dtype,
        target=target,
        xla=dict(xla or {}),
        groups=group_parameters(plan.rows, plan.mesh, stacked),
        state=group_parameters(state, plan.mesh),
        memory=memory,
        device_memory=device_memory,
        fits=fits,
        remedies=tuple(remedies),
        collectives=_sent(plan.collectives, plan.mesh),
        warnings=plan.warnings,
        compiled=compiled and dataclasses.replace(compiled, collectives=_sent(compiled.collectives, plan.mesh)),
        speed=speed,
        comparison=None,
    )


def _sent(moved: Sequence[Collective], mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    return tuple(dataclasses.replace(one, bytes=sent_bytes(one, mesh)) for one in moved)


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values, as `report_schema` describes them."""
    document: dict[str, Any] = TypeAdapter(Report).dump_python(report, mode="json")
    return document


_KINDS = (
    Report,
    Choice,
    Compiled,
    ParameterGroup,
    Memory,
    Collective,
    Written,
    Speed,
    Term,
    Constant,
    Comparison,
    Difference,
)


def report_schema() -> dict[str, Any]:
    """The JSON Schema of `as_json`, each property described by the docstring of its class."""
    schema = TypeAdapter(Report).json_schema(mode="serialization")
    for kind in _KINDS:
        part = schema if kind is Report else schema["$defs"][kind.__name__]
        summary, _, attributes = (kind.__doc__ or "").partition("Attributes:")
        part["description"] = " ".join(summary.split())
        for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {10,}.*)*)", attributes, re.MULTILINE):
            part["properties"][name]["description"] = " ".join(text.split())
        part["required"] = list(part["properties"])  # `as_json` writes what was left at its default, too
        part["additionalProperties"] = False
    return schema
