"""Loops of a plugin's own: whole between their boundaries, continued from them, within the recipe's steps."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from redco_cli.errors import PluginError, RecipeError, Requeue
from redco_cli.run import TrainResult, train
from redco_cli.training.records.metrics import read_records
from redco_cli.training.records.runs import summarize
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.outer_state import OuterState, from_saved, to_saved
from tests.training.tiny import assert_same_run, final_state

FEDERATED = """
import os
import signal
import jax

CLIENTS, ROUNDS, STEPS = 2, 4, 2
_plain, _batches = collate_fn, None


def collate_fn(ctx, examples):
    if _batches is not None:
        _batches.append(len(examples))
        if len(_batches) == int(os.environ.get("STOP_AT", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
    return _plain(ctx, examples)


def predict_fn(ctx, params, batch, rng):
    return jax.random.uniform(rng, (len(batch["x"]),))


def run_fn(run):
    global _batches
    _batches, examples = [], load_examples(run.ctx, "train")
    if run.state is None:
        run.state = {"round": 0, "drawn": [], "generator": np.random.default_rng(7).bit_generator.state,
                     "counts": np.zeros(len(examples), np.int32)}
    while run.state["round"] < ROUNDS:
        generator = np.random.default_rng()
        generator.bit_generator.state = run.state["generator"]
        start, trained = run.params, []
        for client in range(CLIENTS):
            run.params = start
            run.reset_optimizer()
            chosen = generator.permutation(len(examples))[:16]
            run.state["counts"][chosen] += 1
            run.train([examples[i] for i in chosen], steps=STEPS)
            trained.append(run.params)
        run.params = jax.tree.map(lambda *leaves: sum(leaves) / CLIENTS, *trained)
        run.state["drawn"].append(run.predict(examples[:2])[0])
        run.state["drawn"].append(run.predict(examples[:2])[0])
        run.state |= {"round": run.state["round"] + 1, "generator": generator.bit_generator.state}
        run.log({"round": run.state["round"], "spread": float(np.std(run.state["counts"]))})
        run.save()
"""
OVERRIDES = ["train.steps=16", "eval.predict=false", "eval.every=4", "checkpoint.every=4", "eval.at_start=false"]


@pytest.fixture
def federated(project: Path) -> Path:
    with open("plugin.py", "a") as file:
        file.write(FEDERATED)
    return project


def run_fn(body: str) -> None:
    with open("plugin.py", "a") as file:
        file.write(f"\n\ndef run_fn(run):\n    {body}\n")


def run(directory: str = "run", *overrides: str) -> TrainResult:
    return train("recipe.yaml", [*OVERRIDES, f"output_dir={directory}", *overrides])


def kinds(directory: str) -> list[tuple[str, int]]:
    return [
        (one["kind"], one["step"]) for one in read_records(Path(directory) / "metrics.jsonl") if one["kind"] != "train"
    ]


def stopped_at(moments: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs to the end, stopped by SIGTERM as each of these batches is made, and equals the run that was not."""
    expected = run("whole")
    for moment in moments:
        directory = f"stopped-{moment}"
        monkeypatch.setenv("STOP_AT", str(moment))
        with pytest.raises(Requeue) as stopped:
            run(directory)
        assert "saved" in str(stopped.value)
        monkeypatch.delenv("STOP_AT")
        found = run(directory)
        assert found.step == expected.step == 16
        assert_same_run(directory, "whole", 16)


@pytest.mark.slow
@pytest.mark.usefixtures("federated")
def test_a_loop_that_is_stopped_in_a_round_ends_as_if_it_had_not_been(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at([1, 7], monkeypatch)
    state = Checkpoints(Path("whole").resolve(), 2, "min").restore_outer(16).state
    assert state is not None
    assert state["counts"].dtype == np.int32
    assert state["counts"].sum() == 16 * 2 * 4
    assert len(set(state["drawn"])) == 8, "two rollouts drew the same numbers"


@pytest.mark.slow
@pytest.mark.usefixtures("federated")
def test_twenty_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at(random.Random(0).sample(range(1, 25), 20), monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("federated")
def test_evaluation_and_checkpoints_are_those_of_boundaries() -> None:
    """Every four steps end a round of two clients: inside of one nothing is evaluated, saved or called best."""
    outcome = run("run", "eval.every=3", "checkpoint.every=3", "checkpoint.keep=9")
    assert kinds("run") == [(kind, step) for step in (4, 8, 12, 16) for kind in ("run", "eval")]
    assert sorted(path.name for path in Path("run").glob("checkpoint-*")) == [
        "checkpoint-12",
        "checkpoint-16",
        "checkpoint-4",
        "checkpoint-8",
    ]
    assert outcome.train["loss"] > 0
    assert [step for step, _ in outcome.evaluations] == [4, 8, 12, 16]


@pytest.mark.usefixtures("project")
def test_steps_of_the_recipe_are_a_cap() -> None:
    run_fn("[run.train(load_examples(run.ctx, 'train'), steps=5) for _ in range(9)]; run.save()")
    assert run().step == 16


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_plain_call_is_a_run_without_run_fn() -> None:
    run("plain")
    run_fn("run.train()")
    run("own", "eval.best_metric=loss")
    assert_same_run("own", "plain", 16)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "body",
    ["run.train()", pytest.param("[(run.train(steps=4), run.save()) for _ in range(2)]", marks=pytest.mark.slow)],
)
def test_a_finished_loop_is_not_called_again(body: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_fn(f"print('called'); {body}; run.log({{'return': 1}})")
    first = run("run", "eval.predict=true")
    files = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()}
    assert summarize(Path("run")).state == "finished"
    assert capfd.readouterr().out.count("called") == 1
    again = run("run", "eval.predict=true")
    printed = capfd.readouterr()
    why = "all 16 steps were done before" if first.step == 16 else "it ended with step 8, where run_fn returned"
    assert f"run is finished: {why}; nothing is trained\n" in printed.err
    assert "called" not in printed.out
    assert again.was_finished
    assert (again.step, again.best, again.evaluations) == (first.step, first.best, first.evaluations)
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()} == files


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_boundary_that_is_written_again_keeps_its_metric() -> None:
    """At the end `run_fn` saves the last boundary, or the one that it was killed behind, once more."""
    run_fn("[(run.train(steps=4), run.log({'return': run.step}), run.save()) for _ in range(3)]")
    ranked = ["eval.best_metric=return", "eval.best_mode=max"]
    assert run("run", *ranked).best == 12


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_boundary_is_not_evaluated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    run_fn(
        "run.state = run.state or {}; [(run.train(steps=4), run.save()) for _ in range((12 - run.step) // 4)]\n"
        "    if os.environ.get('FAILS'):\n        raise ValueError('behind its last boundary')"
    )
    with open("plugin.py", "a") as file:
        file.write("import os\n")
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(PluginError, match="behind its last boundary"):
        run()
    monkeypatch.delenv("FAILS")
    outcome = run()
    expected = run("whole")
    assert kinds("run") == kinds("whole") == [("eval", step) for step in (4, 8, 12)]
    assert (outcome.best, outcome.step) == (expected.best, expected.step) == (12, 12)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_updates_of_a_loop_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations of an evolution: evaluated, saved and continued by their number, as steps of `train` are."""
    run_fn(
        "while run.step < run.steps:\n"
        "        run.params = jax.tree.map(lambda leaf: 0.9 * leaf, run.params)\n"
        "        run.advance(3)\n"
        "        run.log({'generation': run.step})\n"
        "        if run.step == int(os.environ.get('FAILS_AT', -1)):\n"
        "            raise ValueError('in a generation')\n"
        "        run.save()"
    )
    with open("plugin.py", "a") as file:
        file.write("import os\nimport jax\n")
    outcome = run("run", "checkpoint.keep=9")
    assert outcome.step == 16
    monkeypatch.setenv("FAILS_AT", "12")
    with pytest.raises(PluginError, match="in a generation"):
        run("continued", "checkpoint.keep=9")
    monkeypatch.delenv("FAILS_AT")
    run("continued", "checkpoint.keep=9")
    assert_same_run("continued", "run", 16)
    assert [step for kind, step in kinds("run") if kind == "run"] == [3, 6, 9, 12, 15, 16]
    assert [step for kind, step in kinds("run") if kind == "eval"] == [6, 9, 12, 16]
    assert sorted(int(path.name.partition("-")[2]) for path in Path("run").glob("checkpoint-*")) == [6, 9, 12, 16]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "[run.train(steps=8) for _ in range(5)]; run.save()",
            "run.train does nothing more: all 16 steps are done (train.steps); "
            "a loop of run_fn ends with `while run.step < run.steps`",
        ),
        (
            "[run.train(steps=10) for _ in range(2)]; run.save()",
            "run.train was to do 10 steps, and does 6: these are left of 16 (train.steps)",
        ),
        (
            "[(setattr(run, 'params', run.params), run.save()) for _ in range(5)]",
            "run.params was assigned twice, but no step counted between run.save() and run.save(): "
            "nothing becomes due by steps; call run.advance() after each update that is not run.train's",
        ),
    ],
)
def test_a_loop_that_comes_no_further_is_told_so_once(body: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_fn(body)
    run()
    assert " ".join(capsys.readouterr().err.split()).count(told) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_logged_value_can_rank() -> None:
    run_fn("[(run.train(steps=4), run.log({'return': -run.step % 7}), run.save()) for _ in range(4)]")
    outcome = run("run", "eval.best_metric=return", "eval.best_mode=max", "checkpoint.keep=9")
    assert outcome.best == 8  # -8 % 7 = 6
    with pytest.raises(RecipeError, match=r"eval.best_metric: evaluation gives no retrun"):
        run("other", "eval.best_metric=retrun")


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("run.train([])", "run.train was given no examples"),
        ("run.train(steps=0)", "run.train was given steps=0"),
        ("pass", "run_fn did nothing: it neither trained, evaluated nor predicted"),
        ("run.train(steps=1); run.state = {'f': print}; run.save()", "run.state.f is a builtin_function_or_method"),
        ("run.train(steps=1); run.state = {1: 2}; run.save()", "run.state has the key 1"),
        ("run.advance(0)", "run.advance was given 0"),
        ("run.log({'text': 'x'})", "run.log was given 'x' for text, which is no number"),
        ("run.log(7)", "run.log was given 7"),
        ("run.params = {**run.params, 'new': 1}", "run.params was given parameters with new, which the model has not"),
        ("run.params = {}", "run.params was given parameters without hidden/bias, and 3 more such"),
        (
            "run.params = {**run.params, 'output': {**run.params['output'], 'bias': np.zeros(7)}}",
            "run.params was given parameters with output/bias of shape [7] instead of [3]",
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_of_run_fn(body: str, problem: str) -> None:
    run_fn(body)
    with pytest.raises(PluginError) as refused:
        run()
    assert str(refused.value).startswith(f"plugin.py: run_fn: {problem}")


@pytest.mark.usefixtures("project")
def test_a_loop_without_boundaries_is_told_what_that_means(capsys: pytest.CaptureFixture[str]) -> None:
    run_fn("run.train(steps=2)")
    run()
    assert "run_fn never calls run.save()" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("project")
def test_an_error_in_a_round_leaves_the_checkpoint_before_it() -> None:
    run_fn("run.train(steps=4); run.save(force=True); run.train(steps=2); raise ValueError('simulator')")
    with pytest.raises(PluginError, match="simulator"):
        run()
    assert [path.name for path in Path("run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_an_outer_state_comes_back_as_it_was() -> None:
    state: dict[str, Any] = {
        "step": 3,
        "big": 2**200,
        "text": "ä",
        "nothing": None,
        "nested": {"list": [1.5, True, np.arange(3, dtype=np.int8)], "scalar": np.float32(2)},
        "key": jax.random.key_data(jax.random.key(0)),
    }
    saved = to_saved(OuterState(state, 2))
    state["nested"]["list"][2][0] = 9
    back = from_saved(json.loads(json.dumps(saved.values)), saved.arrays)
    assert back.predictions == 2
    assert back.state is not None
    found, nested = back.state, back.state["nested"]
    assert (found["step"], found["big"], found["text"], found["nothing"]) == (3, 2**200, "ä", None)
    np.testing.assert_array_equal(nested["list"][2], np.arange(3, dtype=np.int8), strict=True)
    assert nested["list"][:2] == [1.5, True]
    assert nested["scalar"].dtype == np.float32


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_fresh_optimizer_has_the_schedule_of_the_run() -> None:
    run_fn("run.train(steps=4); run.reset_optimizer(); run.train(steps=4); run.save(force=True)")
    run()
    rates = [one["learning_rate"] for one in read_records(Path("run/metrics.jsonl")) if one["kind"] == "train"]
    run("plain", "train.steps=16")
    assert len(rates) == 8
    counts = {int(leaf) for leaf in jax.tree.leaves(final_state("run", 8)) if np.ndim(leaf) == 0}
    assert {4, 8} <= counts  # adam began anew, the schedule did not
