"""What the commands print of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redco_cli.console import result, table
from redco_cli.recipe.load import RESOLVED_NAME, load_recipe, shown

if TYPE_CHECKING:  # the command line must not pay for JAX before it needs it
    from redco_cli.training.outcome import TrainResult


def show_training(outcome: TrainResult, as_json: bool) -> None:
    """Prints what a run has come to: its evaluations, where its checkpoints are; once it is finished, what is next."""
    if outcome.evaluations and not as_json:
        columns = list(outcome.evaluations[-1][1])
        rows = [[step, *(values.get(name) for name in columns)] for step, values in outcome.evaluations]
        best = next((row for row, (step, _) in enumerate(outcome.evaluations) if step == outcome.best), None)
        table("evaluations", ["step", *columns], rows, best)
    document = {
        "output_dir": str(outcome.output_dir),
        "step": outcome.step,
        "train": dict(outcome.train),
        "best_checkpoint": None if outcome.best is None else f"checkpoint-{outcome.best}",
        "checkpoint": outcome.checkpoint.name,
    }
    if as_json:
        document["evaluations"] = [{"step": step, **values} for step, values in outcome.evaluations]
        document["was_finished"] = outcome.was_finished
    if outcome.was_finished:
        document["next"] = _what_is_next(outcome)
        if not as_json:
            del document["train"]
    result(document, as_json)


def _what_is_next(outcome: TrainResult) -> dict[str, str]:
    """Commands for what can be done with a finished run."""
    run = shown(outcome.output_dir)
    recipe = outcome.output_dir / RESOLVED_NAME
    commands = {"predict": f"redco predict {run}"}
    model = load_recipe(recipe).recipe.model if recipe.is_file() else None
    if model is not None and (model.name is not None or model.config is not None):
        commands["export"] = f"redco export {run} --output DIR"
    more = f"redco train {shown(recipe)} model.params={run} output_dir=NEW train.steps=N"
    return {**commands, "train on from its parameters": more}
