"""What a plugin is: three functions, some optional ones, and the words this project uses. All a plugin author imports.

Glossary. Each word has one meaning everywhere in redco.
    axis            of a mesh: `data`. Never of an array.
    dim             of an array: a batch has dims [batch, length].
    logical axis    what a dim stands for in the model (`vocab`, `heads`), whatever array it appears in.
    example         one item of a dataset, a dict before `collate_fn` sees it.
    global batch    the examples of one optimizer step, over all processes, devices and micro-batches.
    micro-batch     the part of a global batch that goes through one forward and backward pass, over all devices.
    step            an optimizer step: one update of the parameters. Never a micro-batch.
    token           one position of a sequence that carries loss, unless said otherwise.
    process         one Python program of a run, with devices of its own; a host, which is a machine, usually runs one.
    device          one accelerator, or one (possibly fake) CPU.

Shape letters: B batch, whatever its size; L length of a sequence; V vocabulary.

A plugin is a Python module with these functions. They see a whole batch and hold no device, host or collective code:

    def collate_fn(ctx, examples): ...             # list of dicts -> dict of numpy arrays, leading dim B
    def loss_fn(ctx, params, batch, rng, train):   # -> scalar mean, or Loss(sum, weight, metrics={...})
    def predict_fn(ctx, params, batch, rng): ...   # -> pytree of arrays, leading dim B

and, where needed:

    def encode_fn(ctx, example): ...               # one example -> {"input_ids": [...], "labels": [...]}, not padded
    def prepare_fn(ctx, params, batch): ...        # -> columns computed once, before the first step: leading dim B
    def output_fn(ctx, outputs): ...               # numpy arrays of one batch -> list of B JSON-able predictions
    def metric_fn(ctx, examples, predictions): ... # all examples and predictions -> dict of floats
    def load_examples(ctx, split): ...             # "train" or "eval" -> sequence or iterable of dicts
    def build_model(ctx): ...                      # -> flax.linen.Module, when no named model is used
    def init_batch(ctx): ...                       # -> arrays to build that module with
    def optimizer_fn(ctx, schedule): ...           # -> optax.GradientTransformation
    def init_state(ctx, params): ...               # -> pytree of arrays that are no parameters: ctx.state
    def update_state(ctx, state, params, stats): ... # -> the next one, after every update of the parameters
    def run_fn(run): ...                           # a custom outer loop over run.train / run.evaluate / run.predict

An optional dataclass `Options` types `plugin.options` of the recipe: unknown or mistyped options are then refused.
A global batch is cut into micro-batches as the memory of the devices demands, on another machine otherwise. Nothing but
noise that is drawn for each example, such as dropout, may depend on the cut: `Loss(sum, weight)` adds up over examples.
A loss that needs the batch as a whole (each example against all others) says `whole_batch = True`: it is never cut.

Example, a linear regression:

>>> import numpy as np, jax.numpy as jnp
>>> def collate_fn(ctx, examples):
...     return {name: np.stack([e[name] for e in examples]) for name in ("x", "y")}
>>> def loss_fn(ctx, params, batch, rng, train):
...     error = ctx.model(params, batch["x"])[:, 0] - batch["y"]
...     return Loss((error**2).sum(), error.size)
>>> def predict_fn(ctx, params, batch, rng):
...     return ctx.model(params, batch["x"])[:, 0]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from redco_cli.errors import PluginError
from redco_cli.recipe.schema import Recipe

Params = Any
"""A pytree (nested dicts) of arrays: the parameters of a model."""
Example = Mapping[str, Any]
"""One item of a dataset."""
Batch = Mapping[str, Any]
"""Name to array, each with leading dim B."""
Stage = Literal["train", "eval", "predict", "prepare"]

ADAPTER_OFF = "adapter_off"
"""The name that marks a parameter, in a trace, as one whose adapter is not to be used."""
IGNORED_LABEL = -100
"""The label of a position that carries no loss, as in Hugging Face datasets."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A loss that does not depend on how the batch is cut.

    The core adds sums and weights over micro-batches and devices and divides once, `loss = Σ sum / Σ weight`, so that a
    batch with unevenly masked examples has the same loss and gradient in one piece or in eight.

    Attributes:
        sum: scalar; the loss summed over whatever counts (tokens, examples). Differentiated.
        weight: scalar; how much counted. Not differentiated. Zero is allowed: the batch then adds nothing.
        metrics: name to a scalar sum over the same weight, or to a pair (sum, weight) of its own.
        stats: the same for `update_state` instead of the log, and of any shape, or a pytree of such: the activations of
            each channel, summed over a batch. Added like metrics, and divided by a scalar weight; nan where that is 0.
    """

    sum: Any
    weight: Any
    metrics: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What the functions of a plugin are told.

    Attributes:
        model: a `plugin.model.Model`; None where there are several and none is called `model`, and before there is one
            (`build_model`, `init_batch`, `load_examples`).
        models: all models of the run by name: `model`, those of `models` of the recipe, or what `build_model` returned.
            Of several, parameters are a mapping too: `params["teacher"]`.
        tokenizer: the model's tokenizer, or its processor (images, audio); None when there is none.
        options: the plugin's options: an instance of its `Options` dataclass, or the mapping from the recipe.
        recipe: the whole recipe, typed.
        stage: what a batch is for: `train` and `eval` go to `loss_fn`, `predict` to `predict_fn`, `prepare` to
            `prepare_fn`. A `collate_fn` that builds different batches (a prompt without its answer) looks here.
        state: in `loss_fn` and `predict_fn` what `init_state` and `update_state` made; elsewhere None.
        step: optimizer steps done: a traced int32 scalar in `loss_fn`, `predict_fn` and `update_state`, where the step
            itself is among them; a number in `collate_fn` of training batches; elsewhere None.
        length: in `collate_fn`, what rows of `encode_fn` are padded to, in tokens: `data.max_length`, or the bucket of
            the batch, over all processes; elsewhere None.
    """

    model: Any
    tokenizer: Any
    options: Any
    recipe: Recipe
    stage: Stage = "train"
    state: Any = None
    step: Any = None
    models: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None

    def reference(self, params: Params) -> Params:
        """The parameters with their adapters off: those that the model began with. For a loss that compares.

        Raises:
            PluginError: the recipe has no `adapter`.
        """
        if self.recipe.adapter is None:
            problem = "ctx.reference was called, but the recipe has no adapter that could be off"
            raise PluginError("loss_fn", problem, "add adapter: {}, or name the reference in models: of the recipe")
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, ADAPTER_OFF), params)


class Run(Protocol):
    """What `run_fn` drives: a run with its state. Without a `run_fn`, redco trains to the end of the recipe.

    A piece of work (`train` with examples or steps, `evaluate`, `predict`) is never interrupted, saved or evaluated in
    its midst: only `run_fn` knows when `params` are those of the run. It says so by `save`, a boundary.
    """

    ctx: Context
    params: Params
    """The current parameters; assign to replace them. The optimizer state stays, and frozen `models` must stay too."""
    state: dict[str, Any] | None
    """What the loop keeps between boundaries, the same on every process: a dict of arrays, numbers, text, lists, dicts.
    None in a fresh run. It is in every checkpoint: `run_fn`, called from its first line when a run continues,
    finds it as it was at the last boundary, arrays as numpy's."""
    steps: int
    """Where the run ends: `train.steps` of the recipe, in optimizer steps."""
    examples: Sequence[Example] | Iterable[Example]
    """The training examples of the recipe, whether from `data.train` or from `load_examples`."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    def train(self, examples: Sequence[Example] | None = None, steps: int | None = None) -> Mapping[str, float]:
        """Trains for `steps` optimizer steps (default: once through `examples`) on `examples` (default: the recipe's).

        Never beyond `steps`. Without arguments it trains to the end of the run, with evaluations, checkpoints
        and stops in between, as a run without a `run_fn` does. Returns the means of loss and metrics over these steps.
        """
        ...

    def advance(self, steps: int = 1) -> None:
        """Counts updates that `run_fn` did itself, up to `steps`; the recipe's data of these steps are passed over."""
        ...

    def evaluate(self, examples: Sequence[Example] | None = None) -> Mapping[str, float]:
        """Loss and metrics over every example once (default: the recipe's eval data, and recorded)."""
        ...

    def predict(self, examples: Sequence[Example] | None = None) -> list[Any]:
        """Predictions in the order of `examples` (default: the recipe's eval data); each call draws other numbers."""
        ...

    def log(self, values: Mapping[str, float]) -> None:
        """Records and shows values of the outer loop, such as a return; `eval.best_metric` may be one of them."""
        ...

    def reset_optimizer(self) -> None:
        """Begins the optimizer's state anew (moments of another client); the learning rate goes on where it was."""
        ...

    def save(self, *, force: bool = False) -> None:
        """A boundary: `params` and `state` are those of the run.

        Evaluates if `eval.every` has passed since the last one; writes a checkpoint if `checkpoint.every` has, if the
        run was never better, or by `force`; and after a signal saves and ends the run. The end of `run_fn` is one too.
        """
        ...


class Plugin(Protocol):
    """The module itself, as the core sees it; the optional functions are None where the plugin has none."""

    def collate_fn(self, ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
        """Examples to a batch of numpy arrays with leading dim B = len(examples)."""
        ...

    def loss_fn(self, ctx: Context, params: Params, batch: Batch, rng: Any, train: bool) -> Any:
        """The loss of one batch: a scalar mean over its examples, or a `Loss`. Traced by JAX."""
        ...

    def predict_fn(self, ctx: Context, params: Params, batch: Batch, rng: Any) -> Any:
        """Outputs of one batch, leading dim B. Row i may depend on row i of the batch only. Traced by JAX."""
        ...

    def encode_fn(self, ctx: Context, example: Example) -> Mapping[str, Any] | None:
        """One example as token ids: 1-D arrays or lists by name, neither padded nor cut; None leaves it out.

        With it the core knows lengths. Each example is encoded once, before the first step, and kept on disk; what is
        longer than `data.max_length` is treated as `data.overflow` says; and `data.packing` puts several into one row.
        `collate_fn`, which may then be left out, gets such rows instead of examples and only stacks them
        (`parts.stack_rows` does); `predict_fn` may be left out where the model generates. For the stage `predict` it
        returns the prompt.

        Returns:
            `input_ids`, and `labels` of the same length (default: the ids); other fields as the model takes them.
            Whole numbers become int32, others float32.
        """
        ...

    def prepare_fn(self, ctx: Context, params: Params, batch: Batch) -> Mapping[str, Any]:
        """Columns of the examples of a batch, computed once, before the first step. Traced by JAX.

        `params` are those of the frozen `models`. `collate_fn` made the batch for the stage `prepare`, and finds the
        columns in its examples for `train` and `eval`, as numpy arrays without the dim B.
        """
        ...

    def output_fn(self, ctx: Context, outputs: Any) -> Sequence[Any]:
        """Arrays of one batch to JSON-able predictions, one per example."""
        ...

    def metric_fn(self, ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Metrics over all examples and their predictions."""
        ...

    def load_examples(self, ctx: Context, split: str) -> Sequence[Example] | Iterable[Example]:
        """The examples of "train" or "eval".

        An iterable with `state_dict` and `load_state_dict`, as those of `datasets`, is continued where a run was
        stopped: each epoch reads a copy of the object as it was returned. Any other is read over to that place.
        """
        ...

    def build_model(self, ctx: Context) -> Any:
        """A `flax.linen.Module`, or several by name; what `__call__` takes is looked up in that of `init_batch`."""
        ...

    def init_batch(self, ctx: Context) -> Mapping[str, Any]:
        """Arrays or `jax.ShapeDtypeStruct`s by name, leading dim 1: the shapes of what `build_model`'s module takes.

        Without it, the module takes arrays of a training batch; with other leading dims, as of a graph's nodes and
        edges, arrays of just these shapes. Every checkpoint keeps them: prediction and export need no training data.
        """
        ...

    def optimizer_fn(self, ctx: Context, schedule: Any) -> Any:
        """An optax transformation; `schedule` maps the optimizer step to the learning rate."""
        ...

    def init_state(self, ctx: Context, params: Params) -> Any:
        """State before the first step: arrays by name, from the first parameters. Traced by JAX.

        Those of frozen `models` are not among `params`, here and in `update_state`.

        For what is no parameter but changes with training: moving averages, target networks, the statistics of batch
        normalisation, counters. It is saved and restored with the parameters. A leaf lies as a parameter does if its
        place ends with that of the parameter and it has its shape: `{"ema": params}` is split as `params` are.
        """
        ...

    def update_state(self, ctx: Context, state: Any, params: Params, stats: Mapping[str, Any]) -> Any:
        """The state after an update, of the same shapes. Traced by JAX, as part of the step.

        Args:
            ctx: with `ctx.step`, this step included; `ctx.state` is None.
            state: as it was.
            params: after the update. A step that is skipped, as its loss was not finite, changes no state either.
            stats: name to array: those of `Loss`, over all micro-batches and devices, float32.
        """
        ...

    def run_fn(self, run: Run) -> None:
        """A custom outer loop."""
        ...
