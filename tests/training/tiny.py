"""A run that is small and exact: what it leaves behind, and what a damaged disk would leave of it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import train
from redco_cli.training.loop import TrainingRun
from redco_cli.training.records.metrics import read_records
from redco_cli.training.saving.checkpoint import Checkpoints

EXAMPLES = 20
PLUGIN = f"""
import time
import numpy as np
import flax.linen as nn
from redco_cli.plugin.contract import Loss


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="output")(nn.tanh(nn.Dense(16, name="hidden")(x)))


def build_model(ctx):
    return Net()


class Stream:
    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        return iter(self.examples)


def load_examples(ctx, split):
    generator = np.random.default_rng(0 if split == "train" else 1)
    n = {EXAMPLES} if split == "train" else 21
    x = generator.normal(size=(n, 8)).astype(np.float32)
    examples = [{{"x": x[i], "y": int(x[i, 0] > 0) + int(x[i, 1] > 0), "id": i}} for i in range(n)]
    return Stream(examples) if split == "train" and ctx.options.get("stream") else examples


def collate_fn(ctx, examples):
    time.sleep(ctx.options.get("seconds", 0.0))
    return {{name: np.stack([np.asarray(e[name]) for e in examples]) for name in ("x", "y", "id")}}


def loss_fn(ctx, params, batch, rng, train):
    import jax
    import optax
    x = batch["x"]
    if train:
        x = x + ctx.options.get("noise", 0.1) * jax.random.normal(rng, x.shape)
    each = optax.softmax_cross_entropy_with_integer_labels(ctx.model(params, x), batch["y"])
    seen = {{f"seen/{{i}}": (batch["id"] == i).sum() for i in range({EXAMPLES})}} if train else {{}}
    return Loss(each.sum(), each.size, seen)


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"]).argmax(-1)


def metric_fn(ctx, examples, predictions):
    return {{"exact": sum(e["y"] == p for e, p in zip(examples, predictions, strict=True)) / len(examples)}}
"""
RECIPE = """
plugin: {module: plugin.py}
train: {global_batch_size: 16, micro_batch_size: 8, steps: 12, learning_rate: 1e-2, warmup: 2}
eval: {every: 4, at_start: true, predict: true, batch_size: 8}
checkpoint: {every: 3, keep: 3}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""
_TIMED = ("time", "examples_per_second", "tokens_per_second", "input_wait", "padding")


def write_project(directory: Path) -> None:
    """Writes `plugin.py` and `recipe.yaml`: 12 steps of 16 out of 20 examples, so that epochs end inside batches."""
    (directory / "plugin.py").write_text(PLUGIN)
    (directory / "recipe.yaml").write_text(RECIPE)


def interrupted(step: int, *overrides: str) -> None:
    """Trains in this process until a signal arrives right after a step; saves and ends."""
    is_milestone = TrainingRun._is_milestone

    def interrupting(self: TrainingRun, at: int) -> bool:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return at == step or is_milestone(self, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "_is_milestone", interrupting)
        with pytest.raises(RedcoError, match=f"stopped by a signal after step {step}; saved"):
            train("recipe.yaml", overrides)


def recorded(run: str) -> list[dict[str, Any]]:
    """The records of a run, without what a clock measured."""
    records = read_records(Path(run) / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in _TIMED} for record in records]


def final_state(run: str, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by path: parameters, optimizer state, counters, state of the plugin."""
    checkpoints = Checkpoints(Path(run).resolve(), 99, "min")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    handler = ocp.StandardCheckpointHandler()
    items = [name for name in ("params", "training", "state") if (checkpoints.path(step) / name).is_dir()]
    trees = {name: handler.metadata(checkpoints.path(step) / name).tree for name in items}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), trees)
    restored = checkpoints._restored(step, **abstract)
    leaves = jax.tree_util.tree_leaves_with_path({name: restored[name] for name in abstract})
    checkpoints.close()
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_run(run: str, expected: str, step: int = 12) -> None:
    """Records and final state, bit for bit."""
    pairs = itertools.zip_longest(recorded(run), recorded(expected))
    different = [pair for pair in pairs if pair[0] != pair[1]]
    assert not different, different[:2]
    found, wanted = final_state(run, step), final_state(expected, step)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 8
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def files(checkpoint: Path) -> list[str]:
    """Every file of a checkpoint, relative."""
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def damages(content: bytes, random: np.random.Generator) -> Iterator[tuple[str, bytes | None]]:
    """What may become of a file: cut off, emptied, a bit flipped, replaced, continued, removed (None)."""
    place, bit = int(random.integers(len(content))), 1 << int(random.integers(8))
    yield "cut", content[: int(random.integers(1, len(content)))]
    yield "empty", b""
    yield "flipped", content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    yield "replaced", random.bytes(len(content))
    yield "continued", content + b"\0"
    yield "removed", None


def put(path: Path, content: bytes | None) -> None:
    """Makes a file hold some bytes, or none exist."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def times_seen(records: list[dict[str, Any]]) -> Mapping[int, dict[int, int]]:
    """How often each example was in the batch of each step: {step: {id: times}}; those not seen are left out."""
    counts = {}
    for record in records:
        if record["kind"] == "train":
            found = {i: round(record[f"seen/{i}"] * record["weight"]) for i in range(EXAMPLES)}
            counts[record["step"]] = {i: times for i, times in found.items() if times}
    return counts
