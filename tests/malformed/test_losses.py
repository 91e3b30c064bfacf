"""Losses that run and are wrong: a mean where a sum is meant, and metrics of nothing."""

from pathlib import Path

import pytest

from redco_cli.run import evaluate
from tests.malformed.test_plugins import AT_THE_FIRST_EVALUATION, LOSS, OUTPUT, X

MEAN = (
    "plugin.py:31: loss_fn: Loss.sum does not grow with the number of examples, as a mean does not, but is divided by "
    "Loss.weight, which does: it would be smaller by the size of the batch\n"
    "  -> give the sum, Loss(losses.sum(), losses.size); or return the mean alone, losses.mean()"
)
METRIC = (
    "plugin.py:31: loss_fn: the metric right does not grow with the number of examples, as a mean does not, but is "
    "divided by a weight that does: it would be smaller by the size of the batch\n"
    "  -> give the sum over the examples, such as right.sum(), or a pair of value and weight: (value, 1)"
)
STAT = METRIC.replace("the metric", "the stat").replace("right.sum()", "x.sum(0)")
STATE = """
def init_state(ctx, params):
    return {"x": 0.0}


def update_state(ctx, state, params, stats):
    return state
"""


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        ("Loss(each.mean(), each.size)", MEAN),
        ("Loss((each * batch['y']).sum() / batch['y'].sum(), batch['y'].sum())", MEAN),
        ("Loss(each.sum(), each.size, {'right': (each < 1).mean()})", METRIC),
        ("Loss(each.sum(), each.size, {'right': (each < 1).mean(), 'n': (each.size, 1)})", METRIC),
        ("Loss(each.sum(), each.size, {'right': ((each < 1).mean(), each.size)})", METRIC),
        ("Loss(each.sum(), each.size, {'right': 0.1 * ctx.step})", METRIC),
        ("Loss(each.sum(), each.size, stats={'right': batch['x'].mean(0)})", STAT),
    ],
)  # fmt: skip
def test_a_mean_is_not_divided_once_more(folder, loss: str, error: str) -> None:
    folder.plugin((LOSS, f"return {loss}"), plus=STATE if "stats" in loss else "")
    for command in ("validate", "train"):
        assert folder.refused(command, "recipe.yaml") == error


@pytest.mark.parametrize(
    "loss",
    [
        "each.mean()",
        "Loss(each.mean(), 1)",
        "Loss(each.mean() * each.size, each.size)",
        "Loss((each * batch['y']).sum(), jax.numpy.maximum(batch['y'].sum(), 1))",
        "Loss(each.sum(), each.size, {'right': (each < 1).sum(), 'part': ((each < 1).mean(), 1), 'none': 0.0})",
        "Loss((each - each.mean()).sum() + each.sum(), each.size)",
    ],
)
def test_sums_and_scalar_means_are_what_is_meant(folder, loss: str) -> None:
    folder.plugin((LOSS, f"return {loss}"), ("import numpy", "import jax\nimport numpy"))
    folder.done("validate", "recipe.yaml")


GROWS = (
    "the loss grows with the number of examples in its batch: the result depends on how the batch is cut; return the "
    "mean, "
    "losses.mean(), or Loss(losses.sum(), losses.size)"
)
DIVIDED = (
    "Loss.sum depends on how the batch is cut into micro-batches: a sum over the batch is divided by another, or "
    "multiplied "
    "with one; sum over the examples, Loss(sum, weight); or say whole_batch = True in the plugin: its batches are "
    "never cut"
)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("each.sum()", GROWS),
        pytest.param("Loss(each.sum(), 1)", GROWS, marks=pytest.mark.slow),
        ("(each * batch['y']).sum() / batch['y'].sum()", DIVIDED),
    ],
)
def test_what_depends_on_the_cut_is_told(folder, loss: str, said: str) -> None:
    folder.plugin((LOSS, f"return {loss}"))
    for command in ("validate", "train"):
        assert f"warning: plugin.py:31: loss_fn: {said}\n" in folder.done(command, "recipe.yaml")[1]


def test_a_metric_that_is_misspelt(folder) -> None:
    folder.plugin((LOSS, 'return Loss(each.sum(), each.size, {"accuracy": (each < 1).sum()})'))
    for command in ("validate", "train"):
        assert folder.refused(command, "recipe.yaml", "eval.best_metric=acuracy") == (
            "command line: eval.best_metric: evaluation gives no acuracy\n"
            "  -> did you mean accuracy? Those of metric_fn need eval.predict: true"
        )


def test_a_metric_that_counted_nothing_is_left_out(folder) -> None:
    folder.plugin((LOSS, 'return Loss(each.sum(), each.size, {"rare": ((each < 0).sum(), (each < 0).sum())})'))
    said = "plugin.py: loss_fn: rare is left out: its weight is 0 over the whole evaluation\n"
    stdout, stderr = folder.done("train", "recipe.yaml")
    assert f"warning: {said}" in stderr
    assert "nan" not in stdout + "".join(line for line in stderr.splitlines() if line.startswith("eval"))
    assert list(evaluate("recipe.yaml").values) == ["loss"]
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    assert ["rare" in line for line in lines if '"eval"' in line] == [False, False]


def test_a_metric_that_ranks_and_counted_nothing_is_told(folder) -> None:
    folder.plugin((LOSS, 'return Loss(each.sum(), each.size, {"rare": ((each < 0).sum(), (each < 0).sum())})'))
    said = "plugin.py: loss_fn: rare has no value: its weight is 0 over the whole evaluation\n"
    assert f"warning: {said}" in folder.done("train", "recipe.yaml", "eval.best_metric=rare")[1]


@pytest.mark.parametrize("name", ["output: too few", "output: nothing", "output: no JSON"])
def test_validate_finds_what_output_fn_returns_wrongly(folder, name: str) -> None:
    case = AT_THE_FIRST_EVALUATION[name]
    folder.plugin(*case.replaced)
    assert folder.refused("validate", "recipe.yaml", "eval.predict=true") == case.error


def test_validate_tells_what_output_fn_raises_and_keeps_nothing_that_it_writes(folder) -> None:
    folder.plugin(
        (OUTPUT, "open(ctx.recipe.output_dir + '/x', 'w').close()\n    return [1 // int(one) for one in outputs]")
    )
    said = folder.done("validate", "recipe.yaml", "eval.predict=true")[1]
    assert (
        "warning: plugin.py:40: output_fn: with outputs that are all 0, output_fn raised ZeroDivisionError at `return "
        "[1 // int(one) for one in outputs]`: integer division or modulo by zero; fix the plugin; `redco --traceback"
    ) in said
    assert sorted(path.name for path in folder.root.iterdir() if path.suffix) == ["plugin.py", "recipe.yaml"]


def test_validate_counts_the_shapes_of_batches(folder) -> None:
    folder.plugin(
        (X, 'x = np.zeros((len(examples), 2 + examples[0]["x"][0] // 50), np.float32)'),
        ("range(40 ", "range(300 "),
        ('ctx.model(params, batch["x"])\n', 'ctx.model(params, batch["x"][:, :2])\n'),
    )
    assert (
        "warning: plugin.py: collate_fn: batches of the first 300 train examples, 4 eval examples have up to 6 "
        "shapes, and "
        "each is one more compilation; pad to data.max_length, or to the next of a few lengths\n"
    ) in folder.done("validate", "recipe.yaml")[1]
