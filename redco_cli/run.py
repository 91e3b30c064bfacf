"""The main path: train, evaluate and predict, as sequences of named steps."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from redco_cli.batch_sizes import check_sizes
from redco_cli.console import CountProgress, TrainProgress, note, warn
from redco_cli.data.jsonl import read_jsonl
from redco_cli.examples import stages_of
from redco_cli.job import Job, prepare
from redco_cli.placement import Placement, read_evaluation, read_loss, read_prediction
from redco_cli.planning.choice import choose_placement, recipe_placement
from redco_cli.planning.out_of_memory import explaining_out_of_memory
from redco_cli.planning.validate import MaskedTokens, masked_sequences, summary
from redco_cli.plugin.contract import Example
from redco_cli.plugin.state import Variables
from redco_cli.prediction.columns import with_columns
from redco_cli.prediction.predict import check_output, line_of, write_predictions
from redco_cli.prediction.predictor import Predictor
from redco_cli.prediction.prompt import answer_text, conversation_example, explaining_prompt, prompt_example
from redco_cli.prediction.target import load_target
from redco_cli.recipe.load import LoadedRecipe, find_run, load_recipe, load_run
from redco_cli.recipe.paths import pin_paths
from redco_cli.runtime.cache import enable_compilation_cache
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.runtime.stopping.deadline import stop_in_time
from redco_cli.runtime.stopping.signals import stop_on_signal
from redco_cli.training.cuts.findings import dependences
from redco_cli.training.cuts.means import refuse_means
from redco_cli.training.evaluate import EvalResult, compiled_evaluation
from redco_cli.training.evaluate import evaluate as mean_loss
from redco_cli.training.outcome import TrainResult, finished, recorded_evaluations
from redco_cli.training.saving.identity import Identity
from redco_cli.training.saving.initial import check_initial_params
from redco_cli.training.saving.owner import owning
from redco_cli.training.saving.parameters import trained_variables
from redco_cli.training.saving.resume import find_start, open_output, output_directory
from redco_cli.training.saving.selection import choosing_again
from redco_cli.training.saving.stored import stored_shapes
from redco_cli.training.session import open_run, plan_updates, saved_at_its_end
from redco_cli.training.setup import prove_options
from redco_cli.training.timeline import make_timeline

Name = str | os.PathLike[str]


def train(target: Name, overrides: Sequence[str] = ()) -> TrainResult:
    """Trains a recipe to its end; continues where an earlier, interrupted call stopped, and not once it is finished.

    Args:
        target: a recipe file, the name of a shipped recipe, or the output directory of a run, which is continued.
        overrides: `dotted.key=value` strings.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    began, loaded = time.monotonic(), load_run(target, overrides)
    enable_compilation_cache()
    job, placement = choose_placement(prepare(loaded, stages=stages_of(loaded.recipe)))
    check_sizes(job, placement.mesh)
    prove_options(job)
    where = job.where("output_dir")
    with owning(output_directory(job.recipe.output_dir, where), where):
        return _train(loaded, job, placement, began)


def _train(loaded: LoadedRecipe, job: Job, placement: Placement, began: float) -> TrainResult:
    """Trains a job whose output directory is this run's alone."""
    start, timeline = find_start(
        job.completed(loaded), make_timeline(job.recipe, job.train_size, job.where), Identity(job)
    )
    job, updates = job.with_pinned(start.pinned), plan_updates(job, timeline)
    if outcome := finished(start, job, timeline):
        return outcome
    if start.source is None:
        check_initial_params(job, start.initial)
        for one in [*refuse_means(job), *dependences(job)] if is_main_process() else refuse_means(job):
            warn(f"{one.where}: {one.problem}; {one.remedy}")
    open_output(start.directory, job.where("output_dir"))
    start.identity.now()
    with (
        explaining_out_of_memory(job, placement, "train"),
        stop_on_signal(note) as stop,
        stop_in_time(stop, job.recipe.train.max_time, began, note),
        TrainProgress(timeline.steps, start.step) as progress,
    ):
        predictor = Predictor(job, placement, progress.compiling)

        def predictions(variables: Variables, examples: Sequence[Example], salt: Sequence[int]) -> list[Any]:
            return predictor.all(
                variables, examples, lambda done: progress.phase("predicting", done, len(examples)), salt
            )

        def prepared(job: Job, variables: Variables) -> Job:
            done = functools.partial(progress.phase, "preparing")
            return with_columns(job, placement, variables, progress.compiling, done)

        with (
            open_run(job, placement, timeline, updates, start, progress, predictions, stop, prepared) as (run, outer),
            saved_at_its_end(run, job),
        ):
            run.train() if outer is None else outer.drive(job.plugin.run_fn)
    kept, history = start.checkpoints, run.evaluations.history
    if start.source is kept and is_main_process():
        history = recorded_evaluations(start.directory)
    best, newest = kept.best(), kept.path(kept.steps()[-1])
    return TrainResult(start.directory, run.step, start.step, run.means, history, best, newest)


def evaluate(target: Name, overrides: Sequence[str] = (), *, checkpoint: str = "last") -> EvalResult:
    """Loss and metrics of a run on its eval data or on others, as training evaluates; nothing of the run changes.

    Args:
        target: the output directory of a run, a recipe file, or the name of a shipped recipe.
        overrides: `dotted.key=value` strings, such as `data.eval.data_files=other.jsonl` or `eval.predict=true`.
        checkpoint: `last`, `best`, or the path of a `checkpoint-<step>` directory.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    recipe, directory = find_run(target)
    loaded = load_recipe(recipe, overrides)
    enable_compilation_cache()
    directory = directory or Path(loaded.recipe.output_dir)
    shapes = stored_shapes(loaded, directory, checkpoint)
    job = prepare(loaded, stages=stages_of(loaded.recipe)[1:], init_shapes=shapes)
    placement, count = recipe_placement(job, read_evaluation), len(job.eval_examples)
    with explaining_out_of_memory(job, placement, "eval"), contextlib.ExitStack() as stack:
        variables, origin = trained_variables(job, placement, directory, checkpoint)
        note(f"{count} examples, with the parameters of {origin}")
        if job.plugin.prepare_fn is not None:
            with CountProgress("preparing", count) as preparing:
                job = with_columns(
                    job, placement, variables, preparing.compiling, lambda done, _: preparing.update(done)
                )
        progress = stack.enter_context(CountProgress("evaluating", len(job.eval_rows)))
        step = compiled_evaluation(job, placement, progress.compiling)

        def predictions(variables: Variables, examples: Sequence[Example]) -> list[Any]:
            stack.close()
            with CountProgress("predicting", count) as progress:
                return Predictor(job, placement, progress.compiling).all(variables, examples, progress.update)

        predicts = predictions if job.recipe.eval.predict else None
        values = mean_loss(job, placement.mesh, step, variables, None, lambda done, _: progress.update(done), predicts)
    return EvalResult(origin, count, values)


def predict(
    target: Name,
    overrides: Sequence[str] = (),
    *,
    input: Name | Sequence[Example] | None = None,
    output: Name | None = None,
    checkpoint: str = "last",
) -> Path:
    """Predicts examples into a JSON-lines file, in their order; continues where a killed prediction stopped.

    Args:
        target: the output directory of a run, a recipe file, or the name of a shipped recipe. A recipe predicts with
            the newest checkpoint in its `output_dir`; without one, with `model.params` or the weights of `model.name`.
            Or a model alone, with which a built-in plugin predicts: a directory with `config.json`, or a hub id.
        overrides: `dotted.key=value` strings.
        input: a JSON-lines file, or examples; default: the recipe's `predict.input`, or else its eval examples.
        output: the file to write; default: `predictions/<name of the input>.jsonl` in the output directory.
        checkpoint: `last`, `best`, or the path of a `checkpoint-<step>` directory.

    Returns:
        The file written.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    loaded, directory = load_target(target, overrides)
    given: Sequence[Example] | None = None
    source: Name | None = None
    if input is None or isinstance(input, str | os.PathLike):
        source = pin_paths(loaded).recipe.predict.input if input is None else input
    else:
        given = input
    name = "given" if given is not None else "eval_examples" if source is None else Path(source).stem
    file = Path(output) if output is not None else directory / "predictions" / f"{name}.jsonl"
    check_output(file, source)
    enable_compilation_cache()
    given = given if source is None else read_jsonl(source)
    shapes = stored_shapes(loaded, directory, checkpoint)
    job = prepare(loaded, stages=("predict",), given=given, init_shapes=shapes)
    placement = recipe_placement(job, read_prediction)
    with explaining_out_of_memory(job, placement, "predict"):
        variables, origin = trained_variables(job, placement, directory, checkpoint)
        note(f"{len(job.eval_examples)} examples, with the parameters of {origin}")
        with CountProgress("predicting", len(job.eval_examples)) as progress:
            predictor = Predictor(job, placement, progress.compiling)
            write_predictions(predictor, variables, job, file, origin, progress.update)
    return file


def predict_examples(
    target: Name, examples: Sequence[Example] | str, overrides: Sequence[str] = (), *, checkpoint: str = "last"
) -> list[dict[str, Any]]:
    """Predicts a few examples and keeps nothing on disk.

    Args:
        target: as for `predict`.
        examples: the examples; or a text, of which one example is made under the column that the plugin reads.
        overrides: `dotted.key=value` strings.
        checkpoint: `last`, `best`, or the path of a `checkpoint-<step>` directory.

    Returns:
        For each example what a line of a predictions file would hold: `index`, `example`, `prediction`.

    Raises:
        UsageError: the plugin makes no batch of a text alone.
        RedcoError: with place, problem and remedy.
    """
    loaded, directory = load_target(target, overrides)
    enable_compilation_cache()
    shapes = stored_shapes(loaded, directory, checkpoint)
    if isinstance(examples, str):
        with explaining_prompt():
            job = prepare(loaded, stages=("predict",), given=prompt_example(examples), init_shapes=shapes)
    else:
        job = prepare(loaded, stages=("predict",), given=examples, init_shapes=shapes)
    given, placement = job.eval_examples, recipe_placement(job, read_prediction)
    with explaining_out_of_memory(job, placement, "predict"):
        variables, origin = trained_variables(job, placement, directory, checkpoint)
        note(f"with the parameters of {origin}")
        with CountProgress("predicting", len(given)) as progress:
            found = Predictor(job, placement, progress.compiling).all(variables, given, progress.update)
    return [json.loads(line_of(index, given[index], one, job)) for index, one in enumerate(found)]


def chat(
    target: Name, turns: Iterable[str], overrides: Sequence[str] = (), *, checkpoint: str = "last"
) -> Iterator[Any]:
    """A conversation: the prediction for each turn of the user, given all before it.

    Args:
        target: as for `predict`.
        turns: what the user says; read as answers are taken.
        overrides: `dotted.key=value` strings.
        checkpoint: `last`, `best`, or the path of a `checkpoint-<step>` directory.

    Yields:
        One prediction for each turn.

    Raises:
        UsageError: the plugin makes no batch of a conversation alone.
        RedcoError: with place, problem and remedy.
    """
    loaded, directory = load_target(target, overrides)
    enable_compilation_cache()
    shapes, messages = stored_shapes(loaded, directory, checkpoint), [{"role": "user", "content": "?"}]
    with explaining_prompt("--chat", "a conversation alone"):
        example = conversation_example(messages)
        job = prepare(loaded, stages=("predict",), given=example, init_shapes=shapes)
    placement = recipe_placement(job, read_prediction)
    with explaining_out_of_memory(job, placement, "predict"):
        variables, origin = trained_variables(job, placement, directory, checkpoint)
        note(f"with the parameters of {origin}; a model sees what data.max_length leaves of the conversation")
        predictor, messages = Predictor(job, placement, CountProgress("predicting", 1).compiling), []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            example = conversation_example(messages)
            (answer,) = predictor.all(variables, example(job.plugin), lambda _: None, (number,))
            messages.append({"role": "assistant", "content": answer_text(answer)})
            yield answer


def validate(recipe: Name, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[MaskedTokens]]:
    """Finds everything that can be wrong with a recipe before training: no weights are read, nothing is computed.

    Returns:
        What the recipe comes to, as plain data; and the first training sequences, with what carries loss.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    loaded = load_recipe(recipe, overrides)
    job = prepare(loaded, stages=stages_of(loaded.recipe))
    check_sizes(job, recipe_placement(job, read_loss).mesh)
    prove_options(job)
    fresh, identity = make_timeline(job.recipe, job.train_size, job.where), Identity(job)
    start, timeline = choosing_again(
        lambda: find_start(job.completed(loaded), fresh, identity)
    )  # the run may be training
    updates = plan_updates(job, timeline)
    if start.said:
        note(start.said)
    if start.source is None:
        check_initial_params(job, start.initial)
    return summary(job, timeline, updates.privacy), list(masked_sequences(job))
