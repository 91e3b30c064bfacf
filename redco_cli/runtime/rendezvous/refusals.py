"""Why processes that have come cannot begin: one was stopped, their counts contradict each other, they differ.

Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redco_cli.errors import EXIT_FAILED
from redco_cli.runtime.peers.messages import Message


@dataclass(frozen=True)
class Refusal:
    """Why the processes cannot begin, what to do about it, and the exit code of each.

    Attributes:
        differing: which processes differ from process 0, for each to name in what; see `facts.differences`.
    """

    problem: str
    remedy: str
    code: int = EXIT_FAILED
    differing: Sequence[tuple[int, Sequence[str], int]] = field(default=())


TOO_LATE = Refusal("the run has begun without this process", "was one started twice? give each its id")


def stopped(hellos: Sequence[Message]) -> Refusal | None:
    """That one was asked to stop before all had come; None when none was."""
    for hello in hellos:
        if hello["stopped"] is not None:
            problem = f"process {hello['process']} ({hello['at']}) ended before all had connected: {hello['stopped']}"
            return Refusal(problem, "run the same command to continue", hello["code"])
    return None


def contradiction(hellos: Sequence[Message], processes: int) -> Refusal | None:
    """What those who have come disagree about besides their facts; None when they agree.

    Args:
        hellos: what each said.
        processes: how many process 0 expects.
    """
    seen: dict[int, Message] = {}
    for hello in hellos:
        process = hello["process"]
        if hello["processes"] != processes:
            problem = f"process {process} ({hello['at']}) is one of {hello['processes']} processes, process 0 one of "
            return Refusal(f"{problem}{processes}", "start all processes with the same count")
        if process in seen:
            problem = f"process {process} was started twice: {seen[process]['at']} and {hello['at']}"
            return Refusal(problem, f"give each process its own id, from 0 to {processes - 1}")
        seen[process] = hello
    return None


def missing(processes: Sequence[int], count: int, seconds: float, turned_away: int) -> Refusal:
    """That some did not come.

    Args:
        processes: which did not.
        count: how many there are.
        seconds: in which they should have.
        turned_away: how many came with another secret.
    """
    names = ", ".join(map(str, processes))
    problem = f"process{'es' if len(processes) > 1 else ''} {names} of {count} did not connect within {seconds:g} s"
    if turned_away:
        problem += "; somebody with another REDCO_SECRET, or without one, was turned away"
    remedy = "look at what these print, or whether they were started; REDCO_TIMEOUT=SECONDS waits longer"
    return Refusal(problem, remedy)


def apart(hellos: Sequence[Message]) -> list[int]:
    """Which processes have other facts than process 0; all have come."""
    by_process: Mapping[int, Message] = {hello["process"]: hello for hello in hellos}
    first = by_process[0]
    return [
        process
        for process, hello in sorted(by_process.items())
        if hello["facts"] != first["facts"]
        or (None not in (hello["devices"], first["devices"]) and hello["devices"] != first["devices"])
    ]


def difference(found: Sequence[tuple[int, Sequence[str], int]]) -> Refusal:
    """That some processes differ from process 0, in what each of them names by itself."""
    return Refusal("the processes differ", "start all with one recipe and one installation", differing=found)
