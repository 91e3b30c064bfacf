from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.calls import call_collate, call_loss, call_metric, call_output, call_predict, describe
from redco_cli.plugin.contract import Context
from redco_cli.plugin.state import Variables
from tests.plugin.proving import prove

RECIPE: Any = None
CTX = Context(None, None, {}, RECIPE)
PARAMS = {"w": np.array([1.0, 2.0], np.float32)}
BATCH = {"x": np.array([[1, 2], [3, 4], [5, 6]], np.float32), "y": np.array([1, 0, 1], np.int32)}
SHAPES = "the batch x float32[3, 2], y int32[3]"
WANTED = "expected a scalar mean or Loss(sum, weight, metrics={...}) of scalars"
FIX = "\n  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
TEMPLATE = """\
import sys
import jax.numpy as jnp
from redco_cli.plugin.contract import Loss
def collate_fn(ctx, examples):
    {collate}
def loss_fn(ctx, params, batch, rng, train):
    p = batch["x"] @ params["w"]
    {loss}
def predict_fn(ctx, params, batch, rng):
    {predict}
def output_fn(ctx, outputs):
    {output}
def metric_fn(ctx, examples, predictions):
    {metric}
"""


@pytest.fixture
def plugin(load) -> Callable[..., Any]:
    def with_bodies(**bodies: str) -> Any:
        default = dict.fromkeys(("collate", "loss", "predict", "output", "metric"), "return None")
        return load(TEMPLATE.format(**default | bodies))

    return with_bodies


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(PluginError) as caught:
        call()
    return str(caught.value)


def test_describe():
    assert describe({"a": np.zeros((2, 3), ml_dtypes.bfloat16), "b": {"c": np.zeros(2, bool)}}) == (
        "a bfloat16[2, 3], b.c bool[2]"
    )


def test_a_raise_is_placed_in_the_function_that_has_it(plugin):
    """And not in a comprehension, which has a frame of its own before Python 3.12."""
    loaded = plugin(collate="return {'x': [row['missing'] for row in examples]}")
    text = said(lambda: call_collate(loaded, CTX, [{"x": 1}]))
    assert text.startswith(f"{loaded.file}:5: collate_fn: collate_fn raised KeyError at `return "), text


def test_parameters_of_several_models_for_one_are_recognised(plugin):
    loaded = plugin(predict="import flax; raise flax.errors.ScopeParamNotFoundError('embedding', '/')")
    text = said(lambda: call_predict(loaded, CTX, PARAMS, BATCH, None))
    assert text.endswith('where there are several, params has them by name, params["model"]'), text


class TestLoss:
    @pytest.mark.parametrize(
        ("body", "sum_", "weight", "metrics"),
        [
            ("return p.mean()", 33.0, 3.0, {}),  # p is 5, 11, 17
            ("return Loss(p.sum(), 7)", 33.0, 7.0, {}),
            ("return Loss(p.sum(), batch['y'].sum())", 33.0, 2.0, {}),
            (
                "return Loss(p.sum(), 2, {'a': p.max(), 'b': (p.min(), 4)})",
                33.0,
                2.0,
                {"a": (17.0, 2.0), "b": (5.0, 4.0)},
            ),
            ("return Loss(p.sum().astype(jnp.bfloat16), 0)", 33.0, 0.0, {}),
        ],
    )
    def test_what_it_may_return(self, plugin, body, sum_, weight, metrics):
        loss = call_loss(plugin(loss=body), CTX, PARAMS, BATCH, None, train=True)
        assert (loss.sum, loss.weight, dict(loss.metrics)) == (sum_, weight, metrics)
        assert {leaf.dtype for leaf in jax.tree.leaves(loss)} == {np.dtype(np.float32)}

    def test_only_the_sum_is_differentiated(self, plugin):
        loaded = plugin(loss="return Loss(p.sum(), p.sum(), {'a': p.sum(), 'b': (p.sum(), p.sum())})")

        def total(params: Any) -> Any:
            loss = call_loss(loaded, CTX, params, BATCH, None, train=True)
            return loss.sum + sum(100 * leaf for leaf in jax.tree.leaves((loss.weight, loss.metrics)))

        np.testing.assert_array_equal(jax.grad(total)(PARAMS)["w"], BATCH["x"].sum(0))

    @pytest.mark.parametrize("train", [True, False])
    def test_it_is_told_whether_it_trains(self, plugin, train):
        assert call_loss(plugin(loss="return 1.0 * train"), CTX, PARAMS, BATCH, None, train=train).sum == 3.0 * train

    @pytest.mark.parametrize(
        ("body", "problem", "remedy"),
        [
            ("return p", f"its return value has shape [3] on {SHAPES}; {WANTED}", "reduce it with .mean()"),
            ("return None", f"its return value is NoneType; {WANTED}", "return one number per batch"),
            ("return p.sum(), 3", f"its return value is tuple; {WANTED}", "return one number per batch"),
            ("return {'loss': p.sum()}", f"its return value is dict; {WANTED}", "return one number per batch"),
            (
                "return (p > 0).sum()",
                f"its return value is int32 on {SHAPES}, which has no gradient",
                "return a float; count errors in metrics={...}",
            ),
            (
                "return Loss(3, 1)",
                f"Loss.sum is int32 on {SHAPES}, which has no gradient",
                "return a float; count errors in metrics={...}",
            ),
            ("return Loss(p, 3)", f"Loss.sum has shape [3] on {SHAPES}; {WANTED}", "reduce it with .sum()"),
            (
                "return Loss(p.sum(), p)",
                f"Loss.weight has shape [3] on {SHAPES}; {WANTED}",
                "reduce it with .sum()",
            ),
            ("return Loss(p.sum(), None)", f"Loss.weight is NoneType; {WANTED}", "return one number per batch"),
            (
                "return Loss(p.sum(), 1, {'a': p})",
                f"the metric a has shape [3] on {SHAPES}; {WANTED}",
                "reduce it with .sum()",
            ),
            (
                "return Loss(p.sum(), 1, {'a': [1, 2]})",
                f"the metric a is list; {WANTED}",
                "return one number per batch",
            ),
            (
                "return Loss(p.sum(), 1, {'a': (1, None)})",
                f"the metric a is NoneType; {WANTED}",
                "return one number per batch",
            ),
            (
                "return Loss(p.sum(), 1, None)",
                "the metrics are None, no dict by name",
                "return a dict of name to number",
            ),
            (
                "return Loss(p.sum(), 1, {1: 2})",
                "the metrics are {1: 2}, no dict by name",
                "return a dict of name to number",
            ),
            ("return Loss(p.sum(), 1, {'loss': 2})", "redco records loss itself", "give the metric loss another name"),
        ],
    )
    def test_what_it_may_not_return(self, plugin, body, problem, remedy):
        loaded = plugin(loss=body)
        for stage in ("train", "eval"):
            text = said(lambda stage=stage: prove(loaded, CTX, Variables(PARAMS), BATCH, stage=stage))
            assert text == f"p.py: loss_fn: {problem}\n  -> {remedy}"

    @pytest.mark.parametrize(
        ("body", "problem"),
        [
            ("return batch['z']", "KeyError at `return batch['z']`: 'z'"),
            ("raise ValueError", "ValueError at `raise ValueError`"),
            ("sys.exit(0)", "SystemExit at `sys.exit(0)`: 0"),
            (
                "return p @ params['w']",
                "TypeError at `return p @ params['w']`: dot_general requires contracting dimensions to have the same "
                "shape, got (3,) and (2,).",
            ),
        ],
    )
    def test_what_it_raises_has_its_line_and_the_batch(self, plugin, body, problem):
        loaded = plugin(loss=body)
        fix = "\n  -> batch has x, y; params has w" if "KeyError" in problem else FIX
        assert said(lambda: prove(loaded, CTX, Variables(PARAMS), BATCH, stage="train")) == (
            f"p.py:8: loss_fn: loss_fn raised {problem}\n  on {SHAPES}{fix}"
        )

    def test_a_branch_on_a_value(self, plugin):
        text = said(
            lambda: prove(plugin(loss="return 1.0 if p.sum() else 0.0"), CTX, Variables(PARAMS), BATCH, stage="train")
        )
        assert text.startswith("p.py:8: loss_fn: loss_fn raised TracerBoolConversionError at `return 1.0 if p.sum()")


class TestPredict:
    def test_what_it_may_return(self, plugin):
        outputs = prove(
            plugin(predict="return {'a': batch['x'], 'b': [batch['y']]}"),
            CTX,
            Variables(PARAMS),
            BATCH,
            stage="predict",
        )
        assert jax.tree.map(lambda leaf: leaf.shape, outputs) == {"a": (3, 2), "b": [(3,)]}

    @pytest.mark.parametrize(
        ("body", "found"),
        [
            ("return batch['x'].sum()", "shapes []"),
            ("return batch['x'].T", "shapes [2, 3]"),
            ("return batch['x'], batch['x'][:2]", "shapes [3, 2], [2, 2]"),
            ("return {'a': batch['x'], 'b': 3}", "shapes [3, 2], []"),
            ("return 'text'", "shapes []"),
            ("return None", "nothing"),
            ("return {}", "nothing"),
        ],
    )
    def test_what_it_may_not_return(self, plugin, body, found):
        text = said(lambda: prove(plugin(predict=body), CTX, Variables(PARAMS), BATCH, stage="predict"))
        assert text == (
            f"p.py: predict_fn: it returned {found} on {SHAPES}\n"
            "  -> return arrays whose leading dim is the batch, 3 here"
        )

    def test_what_it_raises(self, plugin):
        text = said(lambda: call_predict(plugin(predict="return 1 / 0"), CTX, PARAMS, BATCH, None))
        assert text == (
            "p.py:10: predict_fn: predict_fn raised ZeroDivisionError at `return 1 / 0`: division by zero\n"
            f"  on {SHAPES}{FIX}"
        )


class TestCollate:
    def test_what_it_raises_names_the_examples(self, plugin):
        examples = [{"text": "a", "label": 1}, {"text": "b"}]
        loaded = plugin(collate="return [example['label'] for example in examples]")
        text = said(lambda: call_collate(loaded, CTX, examples))
        assert text.startswith("p.py:5: ")
        assert text.endswith(f": 'label'\n  on example 2 of 2, with keys text{FIX}")

    def test_what_it_raises_on_every_example_blames_none(self, plugin):
        loaded = plugin(collate="return [example['label'] for example in examples]")
        text = said(lambda: call_collate(loaded, CTX, [{"text": "a", "id": 1}, {"text": "b"}]))
        assert text.endswith(f": 'label'\n  on 2 examples, the first with keys text, id{FIX}")

    def test_an_example_that_is_refused_is_found(self, plugin):
        raising = "from redco_cli.plugin.parts import column; return column(examples, 'text', str)"
        with pytest.raises(ExampleError) as refused:
            call_collate(plugin(collate=raising), CTX, [{"text": "a"}, {"text": "b"}, {"text": 3}, {"text": 4}])
        assert refused.value.row == 2

    def test_a_row_that_the_plugin_names_is_taken(self, plugin):
        raising = "from redco_cli.errors import ExampleError; raise ExampleError('', 'is odd', 'mend it', row=1)"
        with pytest.raises(ExampleError) as refused:
            call_collate(plugin(collate=raising), CTX, [{"text": "a"}, {"text": "b"}])
        assert refused.value.row == 1

    def test_the_line_is_the_plugins_own_even_when_a_library_raised(self, plugin):
        text = said(lambda: call_collate(plugin(collate="return jnp.zeros('x')"), CTX, [{"a": 1}]))
        assert text.startswith("p.py:5: collate_fn: collate_fn raised TypeError at `return jnp.zeros('x')`: ")

    def test_an_error_of_redco_passes_as_it_is(self, plugin):
        raising = "from redco_cli.errors import DataError; raise DataError('data.jsonl:3', 'is empty', 'fill it')"
        with pytest.raises(Exception, match=r"^data\.jsonl:3: is empty\n  -> fill it$"):
            call_collate(plugin(collate=raising), CTX, [{"a": 1}])


OUTPUTS = {"a": np.array([[1, 2], [3, 4]]), "b": np.array([0.5, 1.5], ml_dtypes.bfloat16)}


class TestOutput:
    def test_what_it_may_return(self, plugin):
        loaded = plugin(output="return ({'label': int(label)} for label in outputs['a'][:, 0])")
        assert call_output(loaded, CTX, OUTPUTS, 2) == [{"label": 1}, {"label": 3}]

    def test_without_one_each_row_is_plain(self):
        loaded: Any = SimpleNamespace(output_fn=None)
        assert call_output(loaded, CTX, OUTPUTS, 2) == [{"a": [1, 2], "b": 0.5}, {"a": [3, 4], "b": 1.5}]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("return ['x']", "it returned 1 predictions for 2 examples\n  -> return exactly one prediction per row"),
            ("return None", "it returned NoneType\n  -> return a list, one prediction per row"),
            ("return 'ab'", "it returned str\n  -> return a list, one prediction per row"),
            ("return {'a': 1, 'b': 2}", "it returned dict\n  -> return a list, one prediction per row"),
            (
                "return list(outputs['a'])",
                "a prediction cannot be written as JSON: Object of type ndarray is not JSON serializable\n"
                "  -> return text, numbers, lists and dicts (.tolist(), float())",
            ),
        ],
    )
    def test_what_it_may_not_return(self, plugin, body, message):
        assert said(lambda: call_output(plugin(output=body), CTX, OUTPUTS, 2)) == f"p.py: output_fn: {message}"

    def test_what_it_raises(self, plugin):
        shapes = "the outputs a int64[2, 2], b bfloat16[2]"
        assert said(lambda: call_output(plugin(output="return outputs['c']"), CTX, OUTPUTS, 2)) == (
            f"p.py:12: output_fn: output_fn raised KeyError at `return outputs['c']`: 'c'\n  on {shapes}{FIX}"
        )

    def test_what_a_generator_raises_late(self, plugin):
        text = said(lambda: call_output(plugin(output="yield 1 / 0"), CTX, OUTPUTS, 2))
        assert text.startswith(
            "p.py:12: output_fn: output_fn raised ZeroDivisionError at `yield 1 / 0`: division by zero"
        )


class TestMetric:
    def test_what_it_may_return(self, plugin):
        loaded = plugin(metric="return {'right': jnp.float32(0.5), 'n': len(examples), 'bad': float('nan')}")
        metrics = call_metric(loaded, CTX, [{}, {}], [1, 2])
        assert (metrics["right"], metrics["n"]) == (0.5, 2.0)
        assert np.isnan(metrics["bad"])
        assert {type(value) for value in metrics.values()} == {float}

    def test_without_one_there_are_none(self):
        loaded: Any = SimpleNamespace(metric_fn=None)
        assert call_metric(loaded, CTX, [], []) == {}

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("return 0.5", "the metrics are 0.5, no dict by name\n  -> return a dict of name to number"),
            ("return {'loss': 0.5}", "redco records loss itself\n  -> give the metric loss another name"),
            (
                "return {'a': 'good'}",
                "the metric a is 'good', which is no number\n  -> return a dict of name to number",
            ),
            (
                "return {'b': 0.5, 'a': '0.5'}",
                "the metric a is '0.5', which is no number\n  -> return a dict of name to number",
            ),
            ("return {'a': None}", "the metric a is None, which is no number\n  -> return a dict of name to number"),
        ],
    )
    def test_what_it_may_not_return(self, plugin, body, message):
        assert said(lambda: call_metric(plugin(metric=body), CTX, [], [])) == f"p.py: metric_fn: {message}"

    def test_what_it_raises(self, plugin):
        assert said(lambda: call_metric(plugin(metric="return 1 / len(examples)"), CTX, [], [])) == (
            "p.py:14: metric_fn: metric_fn raised ZeroDivisionError at `return 1 / len(examples)`: division by zero"
            + FIX
        )
