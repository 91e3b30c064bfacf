"""Plugins as people get them wrong: the message names the plugin's own line, and what to write instead."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

EXAMPLES = 'return [{"x": [i, 1.0], "y": i % 3} for i in range(40 if split == "train" else 4)]'
X = 'x = np.array([e["x"] for e in examples], np.float32)'
Y = 'y = np.array([e["y"] for e in examples])'
BATCH = 'return {"x": x, "y": y}'
LOSS = "return Loss(each.sum(), each.size)"
PREDICTION = 'return ctx.model(params, batch["x"]).argmax(-1)'
OUTPUT = "return outputs.tolist()"
METRIC = 'return {"exact": 0.5}'
MODEL = "return Net()"
STREAM = """class Stream:
        def __iter__(self):
            return iter([{"x": [1.0, 2.0], "y": 1}] * 9)
    return Stream()"""
UPDATE = """
def update(gradient, state, params):
    return gradient["Dense_1"], state


def optimizer_fn(ctx, schedule):
    return optax.GradientTransformation(lambda params: (), update)
"""
OPTIONS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    column: str
    size: int = 3
"""


@dataclass(frozen=True)
class Case:
    """What is changed in the plugin, and the whole error."""

    error: str
    replaced: tuple[tuple[str, str], ...] = ()
    plus: str = ""
    overrides: Sequence[str] = ()


BEFORE_TRAINING = {
    "no such file": Case(
        ("command line: plugin.module: no such plugin file: looked for plugins/mine.py\n  -> correct the path"),
        overrides=["plugin.module=plugins/mine.py"],
    ),
    "no such built-in": Case(
        ("command line: plugin.module: causal is neither a built-in plugin nor a module\n  -> did you mean causal_lm?"),
        overrides=["plugin.module=causal"],
    ),
    "no such module": Case(
        (
            "command line: plugin.module: my.own.plugin is neither a built-in plugin nor a module\n"
            "  -> known: captioning, causal_lm, contrastive, dates, distillation, federated, "
            "few_shot, gan, image_classification, instruct, maddpg, meta_learning, name_tasks, outlines, ppo, "
            "python_source, seq2seq, source_pairs, source_tags, stable_diffusion, statements, td3, "
            "text_classification, text_to_image, token_classification, vae"
        ),
        overrides=["plugin.module=my.own.plugin"],
    ),
    "a syntax error": Case(
        (
            "plugin.py:8: importing the plugin raised SyntaxError: invalid syntax (plugin.py, line 8)\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        (("class Net", "class class Net"),),
    ),
    "an indentation error": Case(
        (
            "plugin.py:31: importing the plugin raised IndentationError: unexpected indent (plugin.py, "
            "line 31)\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((LOSS, f" {LOSS}"),),
    ),
    "an import error": Case(
        (
            "plugin.py:4: <module>: importing the plugin raised ModuleNotFoundError at `import optaxx`: "
            "No module named 'optaxx'\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        (("import optax", "import optaxx"),),
    ),
    "a missing function": Case(
        (
            "plugin.py: has no predict_fn; the plugin has predictions_fn\n"
            "  -> define predict_fn(ctx, params, batch, rng)"
        ),
        (("def predict_fn", "def predictions_fn"),),
    ),
    "too few arguments": Case(
        (
            "plugin.py:28: loss_fn: takes (ctx, params, batch), but is called with (ctx, params, batch, "
            "rng, train)\n"
            "  -> write loss_fn(ctx, params, batch, rng, train)"
        ),
        (("(ctx, params, batch, rng, train)", "(ctx, params, batch)"),),
    ),
    "arguments in another order": Case(
        (
            "plugin.py:28: loss_fn: takes (params, ctx, batch, rng, train), but is called with (ctx, "
            "params, batch, rng, train)\n"
            "  -> write loss_fn(ctx, params, batch, rng, train)"
        ),
        (("(ctx, params, batch, rng, train)", "(params, ctx, batch, rng, train)"),),
    ),
    "a number for a function": Case(
        ("plugin.py: metric_fn: is int, not a function\n  -> write metric_fn(ctx, examples, predictions)"),
        plus="metric_fn = 3\n",
    ),
    "collate: the examples themselves": Case(
        (
            "plugin.py: collate_fn: returned a list instead of a dict\n"
            "  -> return a dict of numpy arrays with leading dim 8, one row for each of the 8 examples"
        ),
        ((BATCH, "return examples"),),
    ),
    "collate: nothing": Case(
        (
            "plugin.py: collate_fn: returned a NoneType instead of a dict\n"
            "  -> return a dict of numpy arrays with leading dim 8, one row for each of the 8 examples"
        ),
        ((BATCH, "pass"),),
    ),
    "collate: an empty dict": Case(
        (
            "plugin.py: collate_fn: returned an empty dict\n"
            "  -> return a dict of numpy arrays with leading dim 8, one row for each of the 8 examples"
        ),
        ((BATCH, "return {}"),),
    ),
    "collate: a list in the dict": Case(
        (
            "plugin.py: collate_fn: batch['y'] is a list, not a numpy array\n"
            "  -> return a dict of numpy arrays with leading dim 8, one row for each of the 8 examples"
        ),
        ((BATCH, 'return {"x": x, "y": list(y)}'),),
    ),
    "collate: another leading dim": Case(
        (
            "plugin.py: collate_fn: batch['y'] has shape (3,)\n"
            "  -> return a dict of numpy arrays with leading dim 8, one row for each of the 8 examples"
        ),
        ((BATCH, 'return {"x": x, "y": y[:3]}'),),
    ),
    "collate: objects": Case(
        (
            "plugin.py: collate_fn: batch['y'] has dtype object, which no device can hold\n"
            "  -> turn text into token ids, and rows of unequal length into one padded array"
        ),
        ((BATCH, 'return {"x": x, "y": np.array([e for e in examples])}'),),
    ),
    "collate: text": Case(
        (
            "plugin.py: collate_fn: batch['y'] has dtype <U21, which no device can hold\n"
            "  -> turn text into token ids, and rows of unequal length into one padded array"
        ),
        ((BATCH, 'return {"x": x, "y": y.astype(str)}'),),
    ),
    "collate: rows of unequal length": Case(
        (
            'plugin.py:23: collate_fn: collate_fn raised ValueError at `x = np.stack([e["x"][: 1 + '
            'e["y"] % 2] for e in examples])`: all input arrays must have the same shape\n'
            "  on 8 examples, the first with keys x, y\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((X, 'x = np.stack([e["x"][: 1 + e["y"] % 2] for e in examples])'),),
    ),
    "collate: a column that is not there": Case(
        (
            "plugin.py:24: collate_fn: collate_fn raised KeyError at `y = "
            "np.array([examples[0][\"label\"]] * len(examples))`: 'label'\n"
            "  on 8 examples, the first with keys x, y\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((Y, 'y = np.array([examples[0]["label"]] * len(examples))'),),
    ),
    "collate: other names than the model's": Case(
        (
            "plugin.py: build_model: Net.__call__ takes x, but the batch has features, y\n"
            "  -> give the parameters of __call__ the names that collate_fn gives its arrays, or define init_batch"
        ),
        ((BATCH, 'return {"features": x, "y": y}'),),
    ),
    "loss: one per example": Case(
        (
            "plugin.py: loss_fn: its return value has shape [8] on the batch x float32[8, 2], y "
            "int32[8]; expected a scalar mean or Loss(sum, weight, metrics={...}) of scalars\n"
            "  -> reduce it with .mean()"
        ),
        ((LOSS, "return each"),),
    ),
    "loss: nothing": Case(
        (
            "plugin.py: loss_fn: its return value is NoneType; expected a scalar mean or Loss(sum, "
            "weight, metrics={...}) of scalars\n"
            "  -> return one number per batch"
        ),
        ((LOSS, "pass"),),
    ),
    "loss: a text": Case(
        (
            "plugin.py: loss_fn: its return value is str; expected a scalar mean or Loss(sum, weight, "
            "metrics={...}) of scalars\n"
            "  -> return one number per batch"
        ),
        ((LOSS, 'return "small"'),),
    ),
    "loss: an integer": Case(
        (
            "plugin.py: loss_fn: its return value is int32 on the batch x float32[8, 2], y int32[8], "
            "which has no gradient\n"
            "  -> return a float; count errors in metrics={...}"
        ),
        ((LOSS, "return (logits.argmax(-1) != batch['y']).sum()"),),
    ),
    "loss: a complex number": Case(
        (
            "plugin.py: loss_fn: its return value is complex64 on the batch x float32[8, 2], y int32[8], "
            "which has no gradient\n"
            "  -> return a float; count errors in metrics={...}"
        ),
        ((LOSS, "return each.sum() * 1j"),),
    ),
    "loss: a weight per example": Case(
        (
            "plugin.py: loss_fn: Loss.weight has shape [8] on the batch x float32[8, 2], y int32[8]; "
            "expected a scalar mean or Loss(sum, weight, metrics={...}) of scalars\n"
            "  -> reduce it with .sum()"
        ),
        ((LOSS, "return Loss(each.sum(), batch['y'])"),),
    ),
    "loss: a metric per example": Case(
        (
            "plugin.py: loss_fn: the metric each has shape [8] on the batch x float32[8, 2], y int32[8]; "
            "expected a scalar mean or Loss(sum, weight, metrics={...}) of scalars\n"
            "  -> reduce it with .sum()"
        ),
        ((LOSS, "return Loss(each.sum(), each.size, {'each': each})"),),
    ),
    "loss: a metric called step": Case(
        ("plugin.py: loss_fn: redco records step itself\n  -> give the metric step another name"),
        ((LOSS, "return Loss(each.sum(), each.size, {'step': each.sum()})"),),
    ),
    "loss: raises": Case(
        (
            "plugin.py:31: loss_fn: loss_fn raised ValueError at `raise ValueError('no such class')`: no "
            "such class\n"
            "  on the batch x float32[8, 2], y int32[8]\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((LOSS, "raise ValueError('no such class')"),),
    ),
    "loss: an array that is not in the batch": Case(
        (
            "plugin.py:31: loss_fn: loss_fn raised KeyError at `return (each * "
            "batch['weights']).mean()`: 'weights'\n"
            "  on the batch x float32[8, 2], y int32[8]\n"
            "  -> batch has x, y; params has Dense_0"
        ),
        ((LOSS, "return (each * batch['weights']).mean()"),),
    ),
    "loss: shapes that do not fit": Case(
        (
            "plugin.py:31: loss_fn: loss_fn raised TypeError at `return (logits * batch['x']).sum()`: "
            "mul got incompatible shapes for broadcasting: (8, 3), (8, 2).\n"
            "  on the batch x float32[8, 2], y int32[8]\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((LOSS, "return (logits * batch['x']).sum()"),),
    ),
    "loss: exits": Case(
        (
            "plugin.py:31: loss_fn: loss_fn raised SystemExit at `raise SystemExit('enough')`: enough\n"
            "  on the batch x float32[8, 2], y int32[8]\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((LOSS, "raise SystemExit('enough')"),),
    ),
    "prediction: without the leading dim": Case(
        (
            "plugin.py: predict_fn: it returned shapes [3] on the batch x float32[4, 2], y int32[4]\n"
            "  -> return arrays whose leading dim is the batch, 4 here"
        ),
        ((PREDICTION, 'return ctx.model(params, batch["x"])[0]'),),
    ),
    "prediction: nothing": Case(
        (
            "plugin.py: predict_fn: it returned nothing on the batch x float32[4, 2], y int32[4]\n"
            "  -> return arrays whose leading dim is the batch, 4 here"
        ),
        ((PREDICTION, "pass"),),
    ),
    "model: the class": Case(
        (
            "plugin.py: build_model: returned <class 'redco_plugin_plugin.Net'>, which is no "
            "flax.linen.Module, nor a dict of such by name\n"
            "  -> return an instance of one: return Net(...)"
        ),
        ((MODEL, "return Net"),),
    ),
    "model: nothing": Case(
        (
            "plugin.py: build_model: returned None, which is no flax.linen.Module, nor a dict of such by name\n"
            "  -> return an instance of one: return Net(...)"
        ),
        ((MODEL, "pass"),),
    ),
    "model: an argument that there is not": Case(
        (
            "plugin.py:15: build_model: build_model raised TypeError at `return Net(size=5)`: "
            "Net.__init__() got an unexpected keyword argument 'size'\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((MODEL, "return Net(size=5)"),),
    ),
    "model: shapes that do not fit": Case(
        (
            "plugin.py:11: __call__: Net cannot be applied to {'x': [8, 2]}: dot_general requires "
            "contracting dimensions to have the same shape, got (3,) and (5,).\n"
            "  -> make the arrays of init_batch, or of a batch of collate_fn, fit the module"
        ),
        (("nn.Dense(3)(x)", "nn.Dense(3)(x) @ np.ones((5, 5))"),),
    ),
    "model: with state": Case(
        (
            "plugin.py: build_model: Net keeps variables in batch_stats besides its params\n"
            "  -> keep them: define init_state(ctx, params) that returns ctx.model.init_variables(), and update_state; "
            "or use layers without state, such as GroupNorm or LayerNorm instead of BatchNorm"
        ),
        (("nn.Dense(3)(x)", "nn.BatchNorm(True)(nn.Dense(3)(x))"),),
    ),
    "examples: nothing": Case(
        (
            "recipe.yaml: data.train: there is no training data; load_examples(ctx, 'train') returned "
            "None\n"
            "  -> add data.train, or let load_examples(ctx, 'train') of the plugin return examples"
        ),
        ((EXAMPLES, "pass"),),
    ),
    "examples: none": Case(
        ("plugin.py: load_examples: holds no examples\n  -> check what the data is made from"),
        ((EXAMPLES, "return []"),),
    ),
    "examples: numbers": Case(
        (
            "plugin.py: load_examples: the first example is of type int, not a dict\n"
            "  -> return a list of dicts, or any object with __len__ and __getitem__, or with __iter__, "
            "that gives dicts"
        ),
        ((EXAMPLES, "return [1, 2, 3]"),),
    ),
    "examples: one dict": Case(
        (
            "plugin.py: load_examples: an object of type dict is no sequence of examples\n"
            "  -> return a list of dicts, or any object with __len__ and __getitem__, or with __iter__, "
            "that gives dicts"
        ),
        ((EXAMPLES, 'return {"x": [1, 2]}'),),
    ),
    "examples: of a missing file": Case(
        (
            "plugin.py:19: load_examples: load_examples(ctx, 'train') raised FileNotFoundError at "
            "`return open(\"digits.csv\").readlines()`: [Errno 2] No such file or directory: 'digits.csv'\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((EXAMPLES, 'return open("digits.csv").readlines()'),),
    ),
    "examples: a generator that raises": Case(
        (
            "plugin.py:20: load_examples: load_examples(ctx, 'train') raised ZeroDivisionError at `yield "
            '{"x": [i, 1.0], "y": 6 // (3 - i)}`: integer division or modulo by zero\n'
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((EXAMPLES, 'for i in range(9):\n        yield {"x": [i, 1.0], "y": 6 // (3 - i)}'),),
    ),
    "examples: for evaluation, of unknown length": Case(
        (
            "plugin.py: load_examples: the eval examples have no length, and each must be evaluated "
            "exactly once\n"
            "  -> return a list of dicts, or an object with __len__ and __getitem__"
        ),
        ((EXAMPLES, STREAM),),
        overrides=["train.steps=3"],
    ),
    "examples: epochs of unknown length": Case(
        (
            "command line: train.steps: 1 epoch given: the data has no known length, so epochs cannot be "
            "counted; give steps\n"
            "  -> give a number of steps"
        ),
        ((EXAMPLES, STREAM.replace("return Stream()", 'return Stream() if split == "train" else list(Stream())')),),
        overrides=["train.steps=1 epoch"],
    ),
    "functions: nearly by the name of one": Case(
        (
            "plugin.py:44: init_states: is no function that redco calls, though its name is nearly one\n"
            "  -> call it init_state, or otherwise"
        ),
        plus="def init_states(ctx, params):\n    return {}\n",
    ),
    "optimizer: nothing": Case(
        (
            "plugin.py: optimizer_fn: returned None, which is no optax transformation\n"
            "  -> return one, such as optax.adam(schedule)"
        ),
        plus="def optimizer_fn(ctx, schedule):\n    pass\n",
    ),
    "optimizer: a number": Case(
        (
            "plugin.py: optimizer_fn: returned 0.1, which is no optax transformation\n"
            "  -> return one, such as optax.adam(schedule)"
        ),
        plus="def optimizer_fn(ctx, schedule):\n    return 0.1\n",
    ),
    "optimizer: raises": Case(
        (
            "plugin.py:45: optimizer_fn: optimizer_fn raised TypeError at `return "
            "optax.sgd(lr=schedule)`: sgd() got an unexpected keyword argument 'lr'\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        plus="def optimizer_fn(ctx, schedule):\n    return optax.sgd(lr=schedule)\n",
    ),
    "optimizer: of other parameters": Case(
        (
            "plugin.py:46: update: updating the parameters with what optimizer_fn returned raised "
            "KeyError at `return gradient[\"Dense_1\"], state`: 'Dense_1'\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        plus=UPDATE,
    ),
    "optimizer: of the loss": Case(
        (
            "plugin.py: optimizer_fn: updating the parameters with what optimizer_fn returned raised TypeError: "
            "reduce_on_plateau.<locals>.update_fn() missing 1 required keyword-only argument: 'value'\n"
            "  -> return one that updates from gradients, state and parameters alone: redco gives it neither loss nor "
            "a function"
        ),
        plus="def optimizer_fn(ctx, schedule):\n    return optax.contrib.reduce_on_plateau()\n",
    ),
    "optimizer: another state": Case(
        (
            "plugin.py: optimizer_fn: its update makes another state than its init: {'last': 'int32[]', "
            "'n': 'int32[]'} of {'n': 'int32[]'}\n"
            "  -> return a state of the same structure, shapes and types from both"
        ),
        plus="def optimizer_fn(ctx, schedule):\n"
        "    def update(gradient, state, params=None):\n"
        "        return gradient, {**state, 'last': state['n']}\n\n"
        "    return optax.GradientTransformation(lambda _: {'n': np.int32(0)}, update)\n",
    ),
    "options: unknown and mistyped": Case(
        (
            "command line: plugin.options.column: the plugin needs this option\n"
            "  -> add it; see Options in plugin.py\n"
            "command line: plugin.options.size: '3' given: Input should be a valid integer\n"
            "  -> see Options in plugin.py\n"
            "command line: plugin.options.columm: the plugin has no such option\n"
            "  -> did you mean column?"
        ),
        plus=OPTIONS,
        overrides=["plugin.options={columm: x, size: '3'}"],
    ),
    "options: missing": Case(
        ("recipe.yaml:1: plugin.options.column: the plugin needs this option\n  -> add it; see Options in plugin.py"),
        plus=OPTIONS,
    ),
    "options: no dataclass": Case(
        ("plugin.py: Options: is no dataclass\n  -> decorate it with @dataclass(frozen=True)"),
        plus="class Options:\n    column: str\n",
    ),
}


@pytest.mark.parametrize("name", BEFORE_TRAINING)
def test_found_before_anything_is_written(folder, name: str) -> None:
    case = BEFORE_TRAINING[name]
    folder.plugin(*case.replaced, plus=case.plus)
    for command in ("validate", "train"):
        assert folder.refused(command, "recipe.yaml", "eval.predict=true", *case.overrides) == case.error


AT_THE_FIRST_EVALUATION = {
    "output: too few": Case(
        ("plugin.py: output_fn: it returned 1 predictions for 4 examples\n  -> return exactly one prediction per row"),
        ((OUTPUT, "return [0]"),),
    ),
    "output: nothing": Case(
        ("plugin.py: output_fn: it returned NoneType\n  -> return a list, one prediction per row"), ((OUTPUT, "pass"),)
    ),
    "output: no JSON": Case(
        (
            "plugin.py: output_fn: a prediction cannot be written as JSON: Object of type int32 is not "
            "JSON serializable\n"
            "  -> return text, numbers, lists and dicts (.tolist(), float())"
        ),
        ((OUTPUT, "return list(outputs)"),),
    ),
    "output: raises": Case(
        (
            'plugin.py:39: output_fn: output_fn raised IndexError at `return [("no", '
            '"yes")[outputs.argmax() + 5]] * len(outputs)`: tuple index out of range\n'
            "  on the outputs  int32[4]\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((OUTPUT, 'return [("no", "yes")[outputs.argmax() + 5]] * len(outputs)'),),
    ),
    "metrics: nothing": Case(
        ("plugin.py: metric_fn: the metrics are None, no dict by name\n  -> return a dict of name to number"),
        ((METRIC, "pass"),),
    ),
    "metrics: a text": Case(
        ("plugin.py: metric_fn: the metric exact is 'good', which is no number\n  -> return a dict of name to number"),
        ((METRIC, 'return {"exact": "good"}'),),
    ),
    "metrics: one called step": Case(
        ("plugin.py: metric_fn: redco records step itself\n  -> give the metric step another name"),
        ((METRIC, 'return {"step": 1.0}'),),
    ),
    "metrics: raises": Case(
        (
            'plugin.py:43: metric_fn: metric_fn raised ZeroDivisionError at `return {"exact": 1 / len([p '
            "for p in predictions if p > 9])}`: division by zero\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((METRIC, 'return {"exact": 1 / len([p for p in predictions if p > 9])}'),),
    ),
    "metrics: not the one that decides": Case(
        ("command line: eval.best_metric: evaluation gives no exakt\n  -> it gives loss, exact"),
        overrides=["eval.best_metric=exakt"],
    ),
}


QUICKLY = ("output: too few", "output: no JSON", "metrics: nothing", "metrics: not the one that decides")
"""What is tried in every run of the tests; the others in `make test-all` only."""
EVALUATED = [
    name if name in QUICKLY else pytest.param(name, marks=pytest.mark.slow) for name in AT_THE_FIRST_EVALUATION
]


@pytest.mark.parametrize("name", EVALUATED)
def test_found_at_the_first_evaluation_with_the_steps_before_it_saved(folder, name: str) -> None:
    case = AT_THE_FIRST_EVALUATION[name]
    folder.plugin(*case.replaced, plus=case.plus)
    error = folder.refused("train", "recipe.yaml", "eval.predict=true", *case.overrides, leaves=["run(/.*)?"])
    assert error == case.error
    assert (folder.root / "run" / "checkpoint-2").is_dir()


def test_a_run_goes_on_when_its_evaluation_is_repaired(folder) -> None:
    command = ("train", "recipe.yaml", "eval.predict=true")
    folder.refused(*command, "eval.best_metric=exakt", leaves=["run(/.*)?"])
    assert folder.done(*command, "eval.best_metric=exact")[1].startswith("continuing from run/checkpoint-2\n")


def test_an_evaluation_that_comes_first_fails_before_the_first_step(folder) -> None:
    case = AT_THE_FIRST_EVALUATION["metrics: nothing"]
    folder.plugin(*case.replaced)
    settings = ("eval.predict=true", "eval.at_start=true")
    assert folder.refused("train", "recipe.yaml", *settings, leaves=["run(/[^-]*)?"]) == case.error


LATE = """class Late:
        def __len__(self):
            return 40 if split == "train" else 5
        def __getitem__(self, i):
            if i == 27:
                raise OSError("the disk is gone")
            return {"x": [i, 1.0], "y": 0}
    return Late()"""
LATE_STREAM = """class Late:
        def __iter__(self):
            for i in range(40):
                if i == 27:
                    raise OSError("the disk is gone")
                yield {"x": [i, 1.0], "y": 0}
    return Late() if split == "train" else [next(iter(Late()))]"""
ON_THE_WAY = {
    "an example cannot be read": Case(
        (
            "plugin.py:24: __getitem__: reading an example of load_examples raised OSError at `raise "
            'OSError("the disk is gone")`: the disk is gone\n'
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((EXAMPLES, LATE),),
    ),
    "a stream breaks off": Case(
        (
            "plugin.py:23: __iter__: reading an example of load_examples raised OSError at `raise "
            'OSError("the disk is gone")`: the disk is gone\n'
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((EXAMPLES, LATE_STREAM),),
    ),
    "an example has another shape": Case(
        (
            'plugin.py:23: collate_fn: collate_fn raised ValueError at `x = np.array([e["x"] for e in '
            "examples], np.float32)`: setting an array element with a sequence. The requested array has "
            "an inhomogeneous shape after 1 dimensions. The detected shape was (4,) + inhomogeneous "
            "part.\n"
            "  on 4 examples, the first with keys x, y\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((EXAMPLES, 'return [{"x": [i, 1.0] if i < 27 else [i], "y": 0} for i in range(40)]'),),
    ),
    "an example lacks a column": Case(
        (
            'plugin.py:24: collate_fn: collate_fn raised KeyError at `y = np.array([e["y"] for e in '
            "examples])`: 'y'\n"
            "  on example 4 of 4, with keys x, z, from examples[27]\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        ((EXAMPLES, 'return [{"x": [i, 1.0], "y" if i < 27 else "z": 0} for i in range(40)]'),),
    ),
    "the loop of the plugin raises": Case(
        (
            "plugin.py:46: run_fn: run_fn raised RuntimeError at `raise RuntimeError('the simulator has "
            "crashed')`: the simulator has crashed\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        plus=(
            "def run_fn(run):\n    run.train(steps=6), run.save(force=True)\n"
            "    raise RuntimeError('the simulator has crashed')\n"
        ),
    ),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_found_on_the_way_with_the_steps_before_it_saved(folder, name: str) -> None:
    case = ON_THE_WAY[name]
    folder.plugin(*case.replaced, plus=case.plus)
    settings = ["train.steps=10", "data.shuffle=false", "eval.every=10", "checkpoint.every=10"]
    assert folder.refused("train", "recipe.yaml", *settings, leaves=["run(/.*)?"]) == case.error
    saved = [path.name for path in (folder.root / "run").glob("checkpoint-*")]
    assert len(saved) == 1
    assert 4 <= int(saved[0].removeprefix("checkpoint-")) <= 6  # 27 = 6 * 4 + 3, and two steps are read ahead


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (
            "Loss(each.sum() * float('nan'), each.size)",
            (
                "step 3: the loss is not finite from the first step on, before any update, 3 steps in a row; the "
                "parameters are those of step 0; no checkpoint was due yet\n"
                "  -> look at the data and loss_fn, not at the learning rate: ids of tokens or classes beyond the "
                "table "
                "or the number of classes, a logarithm of 0 or a division by it, nan in the data or in the weights "
                "that "
                "it begins with"
            ),
        ),
        (
            "Loss(each.sum() + ((0 * each) ** 0.5).sum(), each.size)",
            (
                "step 3: the loss is finite, but its gradient is not, from the first step on, before any update, 3 "
                "steps in a row; the parameters are those of step 0; no checkpoint was due yet\n"
                "  -> look at loss_fn, not at the learning rate: a root or a norm at 0, or jnp.where around a division "
                "or logarithm of 0, whose gradient is nan on the side that is not taken too: make the argument safe "
                "instead"
            ),
        ),
        (
            "Loss(each.sum(), 0)",
            (
                "step 3: no position of the batch carries loss, 3 steps in a row; the parameters are those "
                "of step 0; no checkpoint was due yet\n"
                "  -> look at what collate_fn masks and loss_fn counts"
            ),
        ),
    ],
)
def test_a_loss_that_is_no_number_from_the_first_step(folder, loss: str, error: str) -> None:
    folder.plugin((LOSS, f"return {loss}"))
    settings = ["train.max_nonfinite_steps=3", "eval.every=4", "checkpoint.every=4"]
    assert folder.refused("train", "recipe.yaml", *settings, leaves=["run(/[^-]*)?"]) == error
