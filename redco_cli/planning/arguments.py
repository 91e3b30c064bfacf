"""What is written on the command line of a plan, an amount of memory and a mesh, and what is meant where nothing is.

Memory is in bytes. `GB` is a thousand million of them, `GiB` is 2^30; a lone letter (`16g`) means the binary unit, as
it does for the JVM and for containers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from redco_cli.chips.speeds import CLOCKS
from redco_cli.chips.target import Target, chip_of
from redco_cli.console.numbers import format_bytes
from redco_cli.errors import UsageError
from redco_cli.recipe.explain import did_you_mean
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.shipped import shipped_recipes
from redco_cli.runtime.platforms import gpus_here, simulate_devices

AXES = ("data", "fsdp", "tensor")  # those of sharding.plan, which imports JAX: a wrong argument is refused before
_AMOUNT = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,9})?) ?(?P<unit>[a-z]*)", re.ASCII | re.IGNORECASE)
_LETTERS = "kmgtp"
_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "bytes": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{letter + rest: 1024**power for power, letter in enumerate(_LETTERS, 1) for rest in ("", "i", "ib")},
}
_MOST = 2**60
_HIGHEST_PRICE = 1e6
_LONGEST = 40  # characters of a wrong value that a message repeats


def parse_bytes(text: str, where: str) -> int:
    """The number of bytes that `80GiB`, `40GB`, `16g`, `1.5 TiB` or `17179869184` stands for, rounded down.

    Args:
        text: as it was given.
        where: what it was given for, such as `--device-memory`.

    Raises:
        UsageError: it is none of these, it is zero, or more than an EiB.

    Example:
        >>> parse_bytes("80GiB", "--device-memory"), parse_bytes("40GB", "--device-memory")
        (85899345920, 40000000000)
    """
    match = _AMOUNT.fullmatch(text.strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        remedy = "write such as 80GiB, 40GB, 16g or a number of bytes"
        raise UsageError(where, f"{_shown(text)} is no amount of memory", remedy)
    amount = math.floor(Fraction(match["number"]) * unit)
    if not 0 < amount <= _MOST:
        remedy = "give the memory of one device, such as 80GiB"
        raise UsageError(where, f"{_shown(text)} is {format_bytes(amount)}", remedy)
    return amount


def parse_mesh(text: str, where: str) -> dict[str, int]:
    """The mesh that `data=1,fsdp=4,tensor=2` stands for: every axis with its size, 1 where it is not named.

    Args:
        text: as it was given.
        where: what it was given for, such as `--mesh`.

    Raises:
        UsageError: it is no such list, or names an axis twice or one that does not exist.

    Example:
        >>> parse_mesh("tensor=2,fsdp=4", "--mesh")
        {'data': 1, 'fsdp': 4, 'tensor': 2}
    """
    given: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals:
            remedy = "write such as data=1,fsdp=4,tensor=2"
            raise UsageError(where, f"{_shown(part.strip())} is no axis with a size", remedy)
        if axis not in AXES:
            raise UsageError(where, f"{_shown(axis)} is no mesh axis", did_you_mean(axis, AXES))
        if axis in given:
            raise UsageError(where, f"{axis} is given twice", "give each axis once")
        if re.fullmatch(r"[1-9]\d{0,6}", size, re.ASCII) is None:
            problem = f"{axis}={_shown(size)} given, but a mesh axis has 1 to 9999999 devices"
            raise UsageError(where, problem, f"write such as {axis}=2")
        given[axis] = int(size)
    return {axis: given.get(axis, 1) for axis in AXES}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def check_asked(price: float | None, target: Target | None, *, cycles: bool) -> None:
    """Refuses what is asked of a plan for no target, or for another one.

    Raises:
        UsageError: there is no such price, or nothing that has it; or nothing whose cycles a compiler could say.
    """
    if cycles and (target is None or target.chip.platform != "tpu"):
        problem = "cycles are what the compiler of a TPU says of a step"
        raise UsageError("--cycles", problem, "add such as --target v5e:2x4; --compile is for all devices")
    if cycles and target is not None and target.chip.name not in CLOCKS:
        problem = f"how many cycles a second {target.chip.name} has is not published, so they would be no seconds"
        raise UsageError("--cycles", problem, f"take --compile, or one of {', '.join(CLOCKS)}")
    if price is not None and not price <= _HIGHEST_PRICE:
        raise UsageError("--price", f"{price:g} is no price of a chip for an hour", "write such as 2.5")
    if target is None and price is not None:
        problem = "there is no --target whose chips it is the price of"
        raise UsageError("--price", problem, "add such as --target h100:8")


def devices_to_compile_for(
    model: str, devices: int | None, hosts: int | None, mesh: Mapping[str, int] | None
) -> str | None:
    """What `--compile` means without a `--target`: the GPUs of this machine, else simulated devices of its CPU.

    Comes before JAX starts, which then finds those.

    Args:
        model: a recipe, whose mesh counts, or anything else.
        devices: how many to simulate; the GPUs are meant without.
        hosts: that hold them; likewise.
        mesh: instead of the recipe's.

    Returns:
        The GPUs as `--target` names them; None for simulated devices.
    """
    wanted = math.prod((mesh or _mesh_of(model)).values())
    kinds = gpus_here() if devices is hosts is None else []
    chip = chip_of(kinds[0]) if kinds else None
    if chip is None or len({*kinds}) > 1 or wanted > len(kinds):
        simulate_devices(devices or wanted)
        return None
    return f"{chip.name}:{wanted if mesh or wanted > 1 else len(kinds)}"


def _mesh_of(model: str) -> Mapping[str, int]:
    """Sizes of the mesh that a recipe decides on; none for anything else."""
    if model not in shipped_recipes() and not model.endswith((".yaml", ".yml")):
        return {}
    mesh = load_recipe(model).recipe.mesh
    return {} if mesh == "auto" else mesh.model_dump()
