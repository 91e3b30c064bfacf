"""SmolLM3: Llama with layers that have no rotary positions."""

from __future__ import annotations

from redco_cli.models.families.llama import read_llama
from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import TINY, TINY_IDS, layer_windows, llama_names
from redco_cli.models.families.shared.settings import Settings, named


def _smollm3(s: Settings) -> Options:
    options = read_llama(s)
    layers = options["layers"]
    return options | layer_windows(s, layers) | {"layer_ropes": _layer_ropes(s, layers)}


def _layer_ropes(s: Settings, layers: int) -> tuple[int | None, ...]:
    """`no_rope_layers` lists for each layer whether it has rotary positions (1), whatever the name says."""
    turns = s.each("no_rope_layers")
    if len(turns) != layers:
        s.refuse("no_rope_layers", f"no_rope_layers has {len(turns)} entries for {layers} layers", "correct it")
    return tuple(0 if turn else None for turn in turns)


FAMILIES = (
    Family(
        model_type="smollm3",
        read=_smollm3,
        irrelevant=named("use_sliding_window no_rope_layer_interval"),
        names=llama_names(),
        example={**TINY, **TINY_IDS, "no_rope_layer_interval": 2},
        variants=({"use_sliding_window": True, "sliding_window": 3},),
    ),
)
