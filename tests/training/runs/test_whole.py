"""Whole runs: every mesh and micro-batch against one device and one batch, resume against an uninterrupted run."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from redco_cli.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, RedcoError
from redco_cli.run import predict, train
from redco_cli.training.records.metrics import read_records


def losses(directory: str, kind: str = "train") -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_records(Path(directory) / "metrics.jsonl") if r["kind"] == kind}


def comparable(directory: str) -> list[dict[str, object]]:
    timed = {"time", "examples_per_second", "tokens_per_second", "input_wait", "padding"}
    records = read_records(Path(directory) / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in timed} for record in records]


def parameters(directory: str, step: int) -> dict[str, np.ndarray]:
    from redco_cli.recipe.load import load_recipe
    from redco_cli.training.saving.resume import own_checkpoints

    checkpoints = own_checkpoints(Path(directory).resolve(), load_recipe("recipe.yaml").recipe)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"hidden": {"kernel": (5, 16), "bias": (16,)}, "output": {"kernel": (16, 3), "bias": (3,)}}
    abstract = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    return jax.device_get(checkpoints.restore_params(step, abstract))


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("runs", [[(2, 4)], [(1, 2), (8, 8)], [(1, 4), (2, 8), (4, 4)]])
def test_devices_and_micro_batches_change_nothing(runs: list[tuple[int, int]]) -> None:
    for devices, micro in [(1, 8), *runs]:
        settings = ["eval.predict=false", f"mesh.data={devices}", f"train.micro_batch_size={micro}", f"output_dir=run-{devices}-{micro}"]
        train("recipe.yaml", settings)
    reference = losses("run-1-8")
    assert len(reference) == 20
    assert losses("run-1-8", "eval")[20] < 0.95 * losses("run-1-8", "eval")[0]
    for devices, micro in runs:
        name = f"run-{devices}-{micro}"
        np.testing.assert_allclose(list(losses(name).values()), list(reference.values()), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            list(losses(name, "eval").values()), list(losses("run-1-8", "eval").values()), rtol=1e-5, err_msg=name
        )


def test_evaluation_covers_every_example_once(project: Path) -> None:
    """21 examples in batches of 8 on 1 and 8 devices: the loss equals a mean taken by hand."""
    for devices in (1, 8):
        outcome = train("recipe.yaml", [f"mesh.data={devices}", f"output_dir=run-{devices}", "train.steps=5"])
        step, values = outcome.evaluations[-1]
        assert step == 5
        params = parameters(f"run-{devices}", 5)
        scope: dict[str, object] = {}
        exec((project / "plugin.py").read_text(), scope)
        examples = scope["load_examples"](None, "eval")
        batch = scope["collate_fn"](None, examples)
        hidden = np.tanh(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = hidden @ params["output"]["kernel"] + params["output"]["bias"]
        each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(21), batch["y"]]
        expected = (each * batch["counted"]).sum() / batch["counted"].sum()
        right = (logits.argmax(-1) == batch["y"]) * batch["counted"]
        assert values["loss"] == pytest.approx(expected, rel=1e-5)
        assert values["accuracy"] == pytest.approx(right.sum() / batch["counted"].sum(), rel=1e-6)
        assert values["exact"] == pytest.approx((logits.argmax(-1) == batch["y"]).mean(), rel=1e-6)


@pytest.mark.usefixtures("project")
def test_resume_equals_the_uninterrupted_run() -> None:
    train("recipe.yaml", ["output_dir=whole"])
    with pytest.raises(RedcoError, match="stopped by a signal after step 7; saved") as stopped:
        train_until(7, ["output_dir=parts"])
    assert stopped.value.exit_code == EXIT_INTERRUPTED
    assert parameters("parts", 7)["hidden"]["kernel"].tolist() != parameters("whole", 20)["hidden"]["kernel"].tolist()
    outcome = train("recipe.yaml", ["output_dir=parts"])
    assert outcome.step == 20
    assert {step: values["loss"] for step, values in outcome.evaluations} == losses("whole", "eval")
    assert comparable("parts") == comparable("whole")
    jax.tree.map(np.testing.assert_array_equal, parameters("parts", 20), parameters("whole", 20))


def train_until(step: int, overrides: list[str], number: int = signal.SIGINT) -> None:
    """Trains, with a signal to this very process after `step` steps."""
    from redco_cli.training.records.observer import Observer

    see = Observer.see

    def interrupting(self: Observer, at: int, *rest: object) -> None:
        see(self, at, *rest)  # type: ignore[arg-type]
        if at == step - 1:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observer, "see", interrupting)
        train("recipe.yaml", overrides)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_gets_its_exit_code(number: int) -> None:
    with pytest.raises(RedcoError) as stopped:
        train_until(3, [], number)
    assert stopped.value.exit_code == EXIT_REQUEUE
    assert Path("run/checkpoint-3").is_dir()


def test_an_evaluation_that_is_no_number_is_told(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    returned = "return Loss(each.sum(), batch"
    text = (project / "plugin.py").read_text()
    assert returned in text
    (project / "plugin.py").write_text(text.replace(returned, "return Loss(each.sum() + (0 if train else np.nan), batch"))
    assert train("recipe.yaml", ["train.steps=2", "eval.every=2", "eval.at_start=false"]).best is None
    assert "step 2: loss of the evaluation: not finite; it ranks no checkpoint" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_newest_and_best_checkpoints_stay() -> None:
    outcome = train(
        "recipe.yaml", ["checkpoint.keep=1", "eval.every=2", "checkpoint.every=2", "train.learning_rate=1.0"]
    )
    evaluated = losses("run", "eval")
    del evaluated[0]
    best = min(evaluated, key=evaluated.__getitem__)
    kept = {int(path.name.split("-")[1]) for path in Path("run").glob("checkpoint-*")}
    assert kept == {20, best}
    assert outcome.best == best


@pytest.mark.usefixtures("project")
def test_a_changed_recipe_is_refused() -> None:
    train("recipe.yaml", ["train.steps=5"])
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", ["train.steps=5", "train.learning_rate=0.5", "seed=3", "eval.every=1"])
    assert str(refused.value) == (
        "command line: train.learning_rate: 0.5, but checkpoint-5 was trained with 0.01\n"
        "  -> restore the value, or choose another output_dir for a new run\n"
        "command line: seed: 3, but checkpoint-5 was trained with 0\n"
        "  -> restore the value, or choose another output_dir for a new run"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_resume_never_and_by_path() -> None:
    train("recipe.yaml", ["train.steps=10", "checkpoint.keep=2"])
    with pytest.raises(RedcoError, match=r"command line: checkpoint\.resume: never, but .*checkpoint-10 exists"):
        train("recipe.yaml", ["train.steps=10", "checkpoint.resume=never"])
    again = train("recipe.yaml", ["train.steps=10", "checkpoint.resume=run/checkpoint-5", "output_dir=other"])
    assert again.step == 10
    jax.tree.map(np.testing.assert_array_equal, parameters("run", 10), parameters("other", 10))
    with pytest.raises(RedcoError, match="run/nothing is no checkpoint"):
        train("recipe.yaml", ["checkpoint.resume=run/nothing", "output_dir=third"])


def spoil(project: Path, condition: str) -> None:
    text = (project / "plugin.py").read_text()
    text = text.replace("    return Loss(each.sum()", f"    each = each + {condition}\n    return Loss(each.sum()")
    (project / "plugin.py").write_text(text)


def test_a_loss_that_is_not_finite_is_skipped_then_ends_the_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(project, "(float('nan') if train else 0.0)")
    with pytest.raises(RedcoError) as ended:
        train("recipe.yaml", ["train.max_nonfinite_steps=3"])
    assert str(ended.value) == (
        "step 3: the loss is not finite from the first step on, before any update, 3 steps in a row; the parameters are "
        "those of step 0; no checkpoint was due yet\n"
        "  -> look at the data and loss_fn, not at the learning rate: ids of tokens or classes beyond the table or the "
        "number of classes, a logarithm of 0 or a division by it, nan in the data or in the weights that it begins with"
    )
    said = "step 1: the loss is not finite from the first step on, before any update; the update is skipped (1 in a row)"
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("project")
def test_a_loss_that_ceases_to_be_finite_blames_the_learning_rate(project: Path) -> None:
    spoil(project, "(jax.numpy.where(ctx.step > 2, float('nan'), 0.0) if train else 0.0)")
    (project / "plugin.py").write_text("import jax\n" + (project / "plugin.py").read_text())
    with pytest.raises(RedcoError) as ended:
        train("recipe.yaml", ["train.max_nonfinite_steps=3"])
    assert str(ended.value) == (
        "step 6: loss or gradient is not finite, 3 steps in a row; the parameters are those of step 3; "
        f"last checkpoint: {project}/run/checkpoint-5\n"
        "  -> lower train.learning_rate, lengthen train.warmup, lower train.max_grad_norm, or look at the data"
    )


def test_one_bad_batch_leaves_the_parameters_alone(project: Path) -> None:
    """A NaN in one example of 40: the steps that meet it are skipped, the others train."""
    text = (project / "plugin.py").read_text()
    (project / "plugin.py").write_text(
        text.replace('"x": x[i],', '"x": x[i] * (np.nan if i == 5 and split == "train" else 1),')
    )
    outcome = train("recipe.yaml")
    records = [record for record in comparable("run") if record["kind"] == "train"]
    skipped = [record["step"] for record in records if record["loss"] is None]
    assert len(skipped) == 4  # 20 steps of 8 are four epochs of 40
    assert records[-1]["skipped"] == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(parameters("run", 20)))
    assert outcome.evaluations[-1][1]["loss"] < outcome.evaluations[0][1]["loss"]


def test_a_plugin_that_fails_late_loses_nothing(project: Path) -> None:
    text = (project / "plugin.py").read_text()
    text = text.replace(
        "def collate_fn(ctx, examples):",
        "calls = []\ndef collate_fn(ctx, examples):\n    calls.append(1)\n"
        "    if len(calls) == 20:\n        raise KeyError('tokens')",
    )
    (project / "plugin.py").write_text(text)
    with pytest.raises(RedcoError, match=r"plugin.py:\d+: collate_fn: collate_fn raised KeyError"):
        train("recipe.yaml", ["eval.at_start=false", "eval.every=20", "checkpoint.every=20", "data.workers=1"])
    saved = [path.name for path in Path("run").glob("checkpoint-*")]
    assert len(saved) == 1
    assert int(saved[0].split("-")[1]) >= 10


@pytest.mark.usefixtures("project")
def test_frozen_parameters_stay_and_have_no_optimizer_state() -> None:
    train("recipe.yaml", ["train.freeze=[hidden/.*]", "train.steps=5"])
    train("recipe.yaml", ["train.freeze=[hidden/.*]", "train.steps=1", "train.warmup=1", "output_dir=start"])
    before, after = parameters("start", 1), parameters("run", 5)  # the first step of a warm-up has learning rate 0
    np.testing.assert_array_equal(before["hidden"]["kernel"], after["hidden"]["kernel"])
    assert (before["output"]["kernel"] != after["output"]["kernel"]).any()


@pytest.mark.usefixtures("project")
def test_predictions_come_once_in_order_and_continue_after_a_kill() -> None:
    train("recipe.yaml", ["train.steps=5"])
    whole = predict("run", output="whole.jsonl").read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["index"] for line in lines] == list(range(21))
    assert [line["example"]["id"] for line in lines] == list(range(21))

    import redco_cli.prediction.predictor as module

    called = module.call_output

    def killing(*arguments: object) -> list[object]:
        if killing.left == 0:
            raise KeyboardInterrupt
        killing.left -= 1
        return called(*arguments)  # type: ignore[arg-type]

    killing.left = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "call_output", killing)
        with pytest.raises(KeyboardInterrupt):
            predict("run", output="parts.jsonl")
    partial = Path("parts.jsonl.partial")
    assert partial.read_text() == "".join(whole.splitlines(keepends=True)[:8])
    partial.write_text(partial.read_text() + '{"index": 8, "exam')  # a line torn by the kill
    predicted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "call_output", lambda *a: predicted.append(a[-1]) or called(*a))
        predict("run", output="parts.jsonl")
    assert Path("parts.jsonl").read_text() == whole
    assert predicted == [8, 5]
    assert not partial.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_run_fn_drives_its_own_loop() -> None:
    with open("plugin.py", "a") as file:
        file.write(
            "\ndef run_fn(run):\n"
            "    import jax\n"
            "    start = run.params\n"
            "    for round in range(2):\n"
            "        averages = []\n"
            "        for client in range(2):\n"
            "            run.params = start\n"
            "            examples = load_examples(run.ctx, 'train')[client::2]\n"
            "            run.train(examples, steps=3)\n"
            "            averages.append(run.params)\n"
            "        start = jax.tree.map(lambda a, b: (a + b) / 2, *averages)\n"
            "    run.params = start\n"
            "    np.save('average.npy', np.asarray(start['output']['kernel']))\n"
            "    run.log({'round': 2, **{'final_' + k: v for k, v in run.evaluate().items()}})\n"
        )
    outcome = train("recipe.yaml", ["eval.at_start=false", "eval.every=20", "checkpoint.every=20"])
    assert outcome.step == 12
    assert outcome.checkpoint.name == "checkpoint-12"
    records = comparable("run")
    assert [record["kind"] for record in records if record["kind"] != "train"] == ["eval", "run"]
    assert records[-1]["final_loss"] == records[-2]["loss"]
    np.testing.assert_array_equal(parameters("run", 12)["output"]["kernel"], np.load("average.npy"))
    train("recipe.yaml", ["eval.at_start=false", "eval.every=20", "checkpoint.every=3", "output_dir=saved-before"])
    np.testing.assert_array_equal(parameters("saved-before", 12)["output"]["kernel"], np.load("average.npy"))


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("where", ["see", "_train_step"])
def test_too_little_memory_is_an_error_of_the_device(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory can run out when a step is dispatched, or be reported only when its result is waited for."""
    from redco_cli.runtime.program import Program
    from redco_cli.training.records.observer import Observer

    def exhausted(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.\nmore")

    if where == "see":
        monkeypatch.setattr(Observer, "see", exhausted)
    else:
        monkeypatch.setattr(Program, "__call__", exhausted)
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", ["eval.at_start=false"])
    problem, _, remedies = str(refused.value).partition("\n  -> ")
    assert problem.startswith(
        "training: the devices ran out of memory: Out of memory allocating 17179869184 bytes\n"
        "  by plan one device needs "
    )
    assert "saves about" in remedies
