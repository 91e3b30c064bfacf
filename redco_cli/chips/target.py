"""The devices that a program is for: those of this machine, or others that it is planned and compiled for."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from redco_cli.chips.kernels import cudnn_of
from redco_cli.chips.table import CHIPS, Chip, Platform
from redco_cli.errors import UsageError
from redco_cli.recipe.explain import did_you_mean

_WRITTEN = re.compile(
    r"(?:(?P<groups>[1-9]\d{0,3})\*)?(?P<chip>[a-z0-9]+)(?::(?P<sizes>[1-9]\d{0,4}(?:x[1-9]\d{0,4}){0,2}))?"
)
_LARGEST_SLICE = {"v5e": 256, "v6e": 256, "v5p": 8960, "tpu7x": 9216}
"""Chips of a whole pod."""
EXAMPLES = "h100:8, 2*h100:8, v5e:4x4 or 2*v6e:16x16"


@dataclass(frozen=True)
class Target:
    """Devices of one kind.

    Attributes:
        chip: their kind.
        groups: how many hosts (GPU) or slices (TPU), with a slower network between them.
        sizes: chips of each: one number for a host, the dims of the torus for a slice.
    """

    chip: Chip
    groups: int
    sizes: tuple[int, ...]

    @property
    def of_a_group(self) -> int:
        """Devices that reach each other without the network."""
        return math.prod(self.sizes) * self.chip.of_a_chip

    @property
    def devices(self) -> int:
        """All of them."""
        return self.groups * self.of_a_group

    def __str__(self) -> str:
        one = f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"
        return one if self.groups == 1 else f"{self.groups}*{one}"


def parse_target(text: str, where: str) -> Target:
    """The devices that `h100:8`, `2*h100:8`, `v5e:4x4`, `v5p:4x4x4` or `2*v6e:16x16` stand for.

    GPUs beyond one host are cut into hosts: `h100:64` is `8*h100:8`.

    Args:
        text: as it was given.
        where: what it was given for, such as `--target`.

    Raises:
        UsageError: there is no such chip, or it does not come in such numbers.

    Example:
        >>> str(parse_target("h100:64", "--target")), parse_target("2*v5e:4x4", "--target").devices
        ('8*h100:8', 32)
    """
    match = _WRITTEN.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(where, f"{text[:40]!r} names no devices", f"write such as {EXAMPLES}")
    if match["chip"] not in CHIPS:
        raise UsageError(where, f"{match['chip']} is no chip that is known", did_you_mean(match["chip"], tuple(CHIPS)))
    chip = CHIPS[match["chip"]]
    groups = int(match["groups"] or 1)
    sizes = tuple(map(int, match["sizes"].split("x"))) if match["sizes"] else (1,) * max(chip.torus, 1)
    wanted = max(chip.torus, 1)
    if len(sizes) != wanted:
        example = "x".join(["4"] * wanted)
        problem = f"{text} has {len(sizes)} sizes, but "
        problem += f"slices of {chip.name} have {wanted}" if chip.torus else f"the devices of {chip.name} are counted"
        raise UsageError(where, problem, f"write such as {chip.name}:{example if chip.torus else 8}")
    if not chip.torus and sizes[0] > chip.of_a_host:
        if sizes[0] % chip.of_a_host:
            problem = f"{sizes[0]} devices do not fill hosts of {chip.of_a_host}"
            raise UsageError(
                where, problem, f"take a multiple of {chip.of_a_host}, or name hosts, such as 2*{chip.name}:6"
            )
        groups, sizes = groups * (sizes[0] // chip.of_a_host), (chip.of_a_host,)
    if chip.torus:
        _check_slice(chip, sizes, where)
    return Target(chip, groups, sizes)


def _check_slice(chip: Chip, sizes: tuple[int, ...], where: str) -> None:
    """Refuses slices that nobody can have: cut off a square of 16 by halves, or made of cubes of 4, and their parts."""
    flat, most = chip.torus == 2, _LARGEST_SLICE[chip.name]
    has_form = all(size in (1, 2, 4, 8, 16) if flat else size in (1, 2) or size % 4 == 0 for size in sizes)
    if has_form and math.prod(sizes) <= most:
        return
    text = "x".join(map(str, sizes))
    forms = "1, 2, 4, 8 or 16 chips along each dim" if flat else "1, 2 or a multiple of 4 chips along each dim"
    problem = f"{chip.name} has no slice of {text}: a slice has {forms}, and {most:,} in all at most"
    raise UsageError(where, problem, f"write such as {chip.name}:{'4x4' if flat else '4x4x4'}")


_TARGET: ContextVar[Target | None] = ContextVar("target", default=None)


@contextlib.contextmanager
def targeting(target: Target | None) -> Iterator[None]:
    """Within it, models are built and steps planned for these devices; None: for those of this machine."""
    cores = None if target is None else target.chip.multiprocessors
    token = _TARGET.set(target)
    try:
        with contextlib.nullcontext() if cores is None else cudnn_of(cores):
            yield
    finally:
        _TARGET.reset(token)


def current_target() -> Target | None:
    """What programs are built for, where that is not this machine."""
    return _TARGET.get()


def current_platform() -> Platform:
    """Of the devices that programs are built for."""
    target = current_target()
    if target is not None:
        return target.chip.platform
    import jax  # what was typed is read without it

    found: Platform = {"cpu": "cpu", "tpu": "tpu"}.get(jax.default_backend(), "gpu")  # type: ignore[assignment]
    return found


def widest_fused_head() -> int:
    """Dims of a head up to which cuDNN's attention has a gradient on the GPUs of the programs; 0 on other devices.

    It needs an Ampere or later. On Blackwell 256 take a later cuDNN than 9.10.
    """
    capability = _capability()
    return 0 if capability < (8, 0) else 256 if capability[0] == 9 else 128


def _capability() -> tuple[int, ...]:
    """Of CUDA, major and minor; empty for devices without it."""
    target = current_target()
    if target is not None:
        return () if target.chip.multiprocessors is None else target.chip.multiprocessors.capability
    import jax

    said = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    return tuple(map(int, said.split("."))) if re.fullmatch(r"\d+\.\d+", said) else ()


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls so, as `jax.Device.device_kind` says; None for one that is not known."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)
