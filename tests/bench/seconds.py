"""Estimated step times beside published ones, for the configurations that were published.

    python tests/bench/seconds.py                   every row, by its plan
    python tests/bench/seconds.py --compile 26 40   these, compiled (where redco[tpu] and redco[cuda] are installed)

The steps are our own, not those of the frameworks that were measured: where ours recomputes more, cannot offload, or
has no kernel of attention, its time differs for that. A row that does not fit has no time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from redco_cli.planning.inspect import inspect_sharding


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        model: a preset, or a config.
        target: the devices.
        mesh: axis to size.
        batch_size: sequences in a step.
        seq_length: tokens of each.
        seconds: of a step, as published or by the tokens a second that were.
        source: where.
    """

    model: str
    target: str
    mesh: dict[str, int]
    batch_size: int
    seq_length: int
    seconds: float
    source: str


def _config(**sizes: Any) -> str:
    return json.dumps({"model_type": "llama", **sizes})


def _fsdp(size: int, data: int = 1, tensor: int = 1) -> dict[str, int]:
    return {"data": data, "fsdp": size, "tensor": tensor}


DENSE_32B = _config(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=32,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=32000,
    max_position_embeddings=2048,
)
LLAMA_405B = _config(
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
_T, _X = "AI-Hypercomputer/tpu-recipes", "AI-Hypercomputer/maxtext"
ROWS = {
    1: Row("llama-3.1-8b", "v6e:2x4", _fsdp(8), 24, 8192, 3.443, _T),
    3: Row("llama-3.1-8b", "v6e:4x8", _fsdp(32), 96, 8192, 3.495, _T),
    5: Row("llama-3.1-8b", "v6e:8x16", _fsdp(128), 512, 8192, 4.602, _T),
    7: Row("llama-3.1-70b", "v6e:4x8", _fsdp(32), 64, 8192, 17.790, _T),
    8: Row("llama-3.1-70b", "v6e:8x8", _fsdp(64), 128, 8192, 18.688, _T),
    10: Row("llama-3.1-70b", "v6e:16x16", _fsdp(256), 1280, 8192, 42.656, _T),
    11: Row("llama-2-70b", "v6e:16x16", _fsdp(256), 512, 4096, 9.052, _T),
    12: Row(LLAMA_405B, "2*v6e:16x16", _fsdp(512), 512, 8192, 54.803, _T),
    25: Row(DENSE_32B, "v5p:4x4x4", _fsdp(16, tensor=4), 384, 2048, 7.24, f"{_X}, by 328 TFLOP/s per chip"),
    26: Row("llama-2-7b", "h100:8", _fsdp(8), 32, 4096, 1.503, f"{_X}, by 10.5k to 11.3k tokens/s per chip"),
    40: Row("llama-3.1-8b", "h100:8", _fsdp(8), 16, 8192, 2.458, "pytorch/torchtitan, by 6,667 tokens/s per chip"),
}
"""By the number that they have among the published steps that were collected."""


def measured(row: Row, *, compiled: bool) -> dict[str, Any]:
    """What is estimated of one row, or why nothing is."""
    report = inspect_sharding(
        row.model,
        target=row.target,
        mesh=row.mesh,
        batch_size=row.batch_size,
        seq_length=row.seq_length,
        compile_it=compiled,
    )
    speed, chosen = report["speed"], report["chosen"]
    how = f"remat {chosen['remat']}, micro-batch {chosen['micro_batch_size']}"
    if speed is None:
        return {"how": how, "refused": "does not fit"}
    return {"how": how, **{key: speed[key] for key in ("step", "low", "high", "mfu")}}


def lines(numbers: list[int], *, compiled: bool) -> Iterator[str]:
    """The table, and what its errors come to."""
    yield "| row | published | estimated | range | estimated / published | how |"
    yield "|--:|--:|--:|--:|--:|---|"
    ratios = []
    for number in numbers:
        row, found = ROWS[number], measured(ROWS[number], compiled=compiled)
        if "refused" in found:
            yield f"| {number} | {row.seconds:.3f} s | {found['refused']} | | | {found['how']} |"
            continue
        ratios.append(found["step"] / row.seconds)
        between = f"{found['low']:.2f} to {found['high']:.2f}"
        estimated = f"{found['step']:.3f} s | {between} | {ratios[-1]:.2f}"
        yield f"| {number} | {row.seconds:.3f} s | {estimated} | {found['how']} |"
    if ratios:
        error = statistics.median(abs(ratio - 1) for ratio in ratios)
        yield f"{len(ratios)} of {len(numbers)} rows have a time; median error {error:.0%}"
        middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {len(ratios)} rows)"
        yield f"=> step time, estimated / published, {'compiled' if compiled else 'by the plan'}: {middle}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("rows", nargs="*", type=int, help="default: all")
    given = parser.parse_args()
    for line in lines(given.rows or list(ROWS), compiled=given.compile):
        print(line, flush=True)
