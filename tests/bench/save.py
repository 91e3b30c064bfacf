"""What a save costs the training beyond the copy off the device: the steps around one, beside steps without.

    python tests/bench/save.py [--width 1024] [--layers 4] [--rounds 8]

A stack of square matrices with Adam is trained in intervals, in turn one that begins with a save and one that does not.
Printed are medians and two ratios:

    blocked = (the call of save - the copy) / one step          what the loop waits for; meant to stay below 0.05
    slower  = (interval with - interval without - the copy) / interval without

The second holds what the writing threads take from the step, too. On a CPU both share the cores; on a GPU they do not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.meta import Meta
from redco_cli.training.state import TrainState, new_state


def make_step(layers: int) -> Any:
    """A jitted train step of a deep linear net on noise: matrices only, as most of a large model is."""
    optimizer = optax.adamw(1e-4)

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        for layer in range(layers):
            batch = jnp.tanh(batch @ params[f"layer{layer}"])
        return (batch**2).mean()

    def train_step(state: TrainState, batch: jax.Array) -> TrainState:
        gradient = jax.grad(loss)(state.trainable, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        return TrainState(state.step + 1, trainable, {}, opt_state, None, state.skipped, state.streak)

    return optimizer, jax.jit(train_step, donate_argnums=0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20, help="steps of an interval")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    optimizer, step = make_step(arguments.layers)
    shape = (arguments.width, arguments.width)
    keys = jax.random.split(jax.random.key(0), arguments.layers)
    params = {f"layer{i}": jax.random.normal(key, shape) * arguments.width**-0.5 for i, key in enumerate(keys)}
    state = jax.jit(lambda given: new_state(given, frozenset(), optimizer))(params)
    batch = jax.random.normal(jax.random.key(1), (arguments.batch, arguments.width))
    times: dict[str, list[float]] = {"without": [], "with": [], "copy": [], "save": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), 2, "min")
        state = jax.block_until_ready(step(state, batch))
        for number in range(2 * arguments.rounds):
            kind = "with" if number % 2 else "without"
            began = time.perf_counter()
            if kind == "with":
                checkpoints.save(state, Meta(number + 1, None, None, False, {}))
                times["save"].append(time.perf_counter() - began)
            for _ in range(arguments.steps):
                state = step(state, batch)
            jax.block_until_ready(state)
            times[kind].append(time.perf_counter() - began)
            checkpoints.wait()
            began = time.perf_counter()
            copied = jax.tree.map(np.array, state)
            times["copy"].append(time.perf_counter() - began)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(copied))
        checkpoints.close()
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    one = middle["without"] / arguments.steps
    blocked = [(seconds - middle["copy"]) / one for seconds in times["save"]]
    slower = [(seconds - middle["without"] - middle["copy"]) / middle["without"] for seconds in times["with"]]
    print(
        f"state {size / 2**20:.0f} MiB, {arguments.steps} steps of {one:.3f} s an interval, {jax.devices()[0].platform}"
    )
    print(f"interval without a save {middle['without']:.3f} s, with {middle['with']:.3f} s")
    print(f"the call of save {middle['save']:.3f} s, the copy {middle['copy']:.3f} s")
    for what, ratios in (("what the loop waits for / a step", blocked), ("what an interval takes longer", slower)):
        middle_ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}; {len(ratios)} rounds)"
        print(f"=> a save: {what}: {middle_ratio}")


if __name__ == "__main__":
    main()
