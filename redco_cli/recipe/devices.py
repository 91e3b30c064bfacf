"""The sections about devices: how they are laid out, and what the user decides about single parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from redco_cli.recipe.section import Positive, Section


class MeshSection(Section):
    """The device mesh: their product is the number of devices."""

    data: Positive = 1
    """Groups of devices that each hold all parameters and take their share of every batch."""
    fsdp: Positive = 1
    """Devices that share a batch and the parameters, which are gathered where they are used."""
    tensor: Positive = 1
    """Devices that compute every layer together, each a part of its heads and features."""


class OverrideSection(Section):
    """Where some parameters live, whatever the rules say."""

    path: Annotated[str, Field(min_length=1)]
    """Regular expression, searched for in the paths that `redco inspect-sharding` lists."""
    axes: Annotated[tuple[Literal["fsdp", "tensor", "tensor+fsdp"] | None, ...], Field(strict=False)]
    """For each dim the mesh axis that splits it, both, or null; dims that are not listed stay whole."""


class ShardingSection(Section):
    """How parameters are split over the mesh; by default as the program implies."""

    override: Annotated[tuple[OverrideSection, ...], Field(strict=False)] = ()
    """Decisions about single parameters; the last that matches counts."""
