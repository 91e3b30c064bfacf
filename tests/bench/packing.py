"""What packing and buckets gain: real tokens/s of the same texts packed, in buckets of lengths, and padded.

    python tests/bench/packing.py [--median 200] [--max-length 2048] [--batch 8] [--steps 12] [--rounds 3]

The lengths of the texts are log-normal. All three ways train the same small decoder on batches of as many rows, in
turn; the first half of the steps warms up. Printed are tokens/s, the share of positions that are padding, and of each
way the ratio to padding: of tokens/s, and of the filled positions, which is what it can be at best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from redco_cli.run import train
from redco_cli.training.records.metrics import read_records

WAYS = {"packed": [], "buckets": ["data.packing=false"], "padded": ["data.packing=false", "data.buckets=false"]}
RECIPE = """
model: {config: {model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 4096}, task: causal_lm, tokenizer: byte}
data: {train: {path: json, data_files: texts.jsonl}}
plugin: {module: causal_lm}
eval: {predict: false}
checkpoint: {every: 100000}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""


def write_texts(count: int, median: float, sigma: float, longest: int) -> None:
    """Texts whose number of bytes is log-normal."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, count).astype(int).clip(8, longest - 1)
    lines = (json.dumps({"text": "a quick brown fox " * (length // 18) + "x" * (length % 18)}) for length in lengths)
    Path("texts.jsonl").write_text("\n".join(lines) + "\n")


def measured(overrides: list[str], batch: int, steps: int) -> tuple[float, float]:
    """Tokens/s and the share of padding over the second half of a run, by its records."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        train("recipe.yaml", [*overrides, f"train.steps={steps}", f"output_dir={directory}/run"])
        rows = [row for row in read_records(Path(directory) / "run/metrics.jsonl") if row["kind"] == "train"]
    half = rows[len(rows) // 2 :]
    seconds = [batch / row["examples_per_second"] for row in half]
    tokens = [row["tokens_per_second"] * took for row, took in zip(half, seconds, strict=True)]
    positions = sum(count / (1 - row["padding"]) for row, count in zip(half, tokens, strict=True))
    return sum(tokens) / sum(seconds), 1 - sum(tokens) / positions


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--median", type=float, default=200)
    parser.add_argument("--sigma", type=float, default=0.75)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("recipe.yaml").write_text(RECIPE)
        write_texts(4000, asked.median, asked.sigma, asked.max_length)
        sizes = [f"data.max_length={asked.max_length}", f"train.global_batch_size={asked.batch}"]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for _ in range(asked.rounds):
            for name, overrides in WAYS.items():
                given = [*sizes, f"train.micro_batch_size={asked.batch}", *overrides]
                found[name].append(measured(given, asked.batch, asked.steps))
        os.chdir("/")
    ratios = {name: [a / b for (a, _), (b, _) in zip(found[name], found["padded"], strict=True)] for name in WAYS}
    speeds = {name: statistics.median(speed for speed, _ in rounds) for name, rounds in found.items()}
    padding = {name: statistics.mean(share for _, share in rounds) for name, rounds in found.items()}
    for name in WAYS:
        gain, most = speeds[name] / speeds["padded"], (1 - padding[name]) / (1 - padding["padded"])
        print(f"{name:8s} {speeds[name]:9.0f} tokens/s  {padding[name]:4.0%} padding  {gain:5.2f} x, of {most:.2f} x")
        own = ratios[name]
        if name != "padded":
            middle = f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f}; {len(own)} rounds)"
            print(f"=> tokens/s {name} / padded, at best {most:.2f}: {middle}")


if __name__ == "__main__":
    main()
