"""What the training loop costs: tokens/s of `redco train` beside a bare loop over the same jitted step.

    python tests/bench/overhead.py [--steps 40] [--rounds 5] [--recipe quickstart]

Both run the quickstart model in one process, in turn, on batches of the same shapes; the bare loop takes its batches
from memory and does nothing but dispatch. Printed is the median over the rounds of the ratio (1 is no overhead).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax

from redco_cli.console import TrainProgress, open_console
from redco_cli.job import prepare
from redco_cli.planning.choice import choose_placement
from redco_cli.recipe.load import load_recipe
from redco_cli.runtime.cache import enable_compilation_cache
from redco_cli.runtime.stopping.signals import StopRequest
from redco_cli.training.input_pipeline import device_batches
from redco_cli.training.loop import TrainingRun
from redco_cli.training.records.speed import Meter
from redco_cli.training.saving.identity import Identity
from redco_cli.training.saving.resume import Start, open_output, output_directory
from redco_cli.training.saving.selection import own_checkpoints
from redco_cli.training.session import open_run, plan_updates
from redco_cli.training.timeline import make_timeline


def bare(run: TrainingRun, batches: list[object]) -> float:
    """Seconds for one step per batch."""
    step, state = run._train_step, run._state
    jax.block_until_ready(state)
    began = time.perf_counter()
    for batch in batches:
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    run._state = state
    return seconds


def redco(run: TrainingRun, steps: int) -> float:
    """Seconds for the same number of steps as a run does them: data, metrics, records, live line."""
    jax.block_until_ready(run._state)
    began = time.perf_counter()
    run.train_piece(None, steps)
    jax.block_until_ready(run._state)
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="quickstart")
    arguments = parser.parse_args()
    enable_compilation_cache()
    total = arguments.steps * arguments.rounds + 1
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w", encoding="utf-8") as log:
        overrides = [f"output_dir={folder}/run", f"train.steps={total + 1}", "train.warmup=0", "eval.every=null"]
        overrides += ["eval.at_start=false", "checkpoint.every=null", "logging.plot=false"]
        job, placement = choose_placement(prepare(load_recipe(arguments.recipe, overrides), stages=("train",)))
        timeline = make_timeline(job.recipe, job.train_size, job.where)
        updates = plan_updates(job, timeline)
        directory = output_directory(job.recipe.output_dir, "output_dir")
        open_output(directory, "output_dir")
        start = Start(directory, own_checkpoints(directory, job.recipe), job.recipe, Identity(job))
        fed = device_batches(job, placement.mesh, Meter(), job.train_examples, range(arguments.steps), seed=1)
        batches = [batch for batch, _ in fed]
        progress = TrainProgress(timeline.steps, console=open_console(log, terminal=False))
        with (
            progress,
            open_run(job, placement, timeline, updates, start, progress, lambda *_: [], StopRequest()) as (run, _),
        ):
            run.train_piece(None, 1)
            ratios = []
            for number in range(arguments.rounds):
                slow, fast = redco(run, arguments.steps), bare(run, batches)
                ratios.append(fast / slow)
                print(f"round {number + 1}: bare {fast:.2f} s, redco {slow:.2f} s, ratio {ratios[-1]:.3f}", flush=True)
    middle = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}; {len(ratios)} rounds)"
    print(f"=> tokens/s of redco train / bare loop, {arguments.recipe}: {middle}")


if __name__ == "__main__":
    main()
