"""Runs of layers with the same parts: each is one loop, over parameters stacked under a name of its own.

Most decoders have one run, `layers`. Where layers with an MLP stand among layers with experts, runs are numbered in
order: with experts in all but the first of four layers, `layers_0` has one layer and `layers_1` three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from redco_cli.models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class LayerRun:
    """Layers after one another with the same parts.

    Attributes:
        name: of their stack among the parameters.
        first: number of the first layer.
        count: how many they are.
        config: the decoder's, with the parts that these have.
    """

    name: str
    first: int
    count: int
    config: DecoderConfig


def layer_runs(config: DecoderConfig) -> tuple[LayerRun, ...]:
    """The runs of a decoder, in order."""
    dense = set(config.dense_layers)
    runs = [(kind, list(members)) for kind, members in groupby(range(config.layers), key=lambda layer: layer in dense)]
    return tuple(
        LayerRun(
            "layers" if len(runs) == 1 else f"layers_{number}",
            members[0],
            len(members),
            replace(config, experts=None) if is_dense else config,
        )
        for number, (is_dense, members) in enumerate(runs)
    )
