"""Every Hugging Face Flax class behind the `Model` interface: abstract parameters, init, apply, generate.

The classes differ in how they are called: OPT says `deterministic` where the others say `train`, ELECTRA takes absent
token types for ones where PyTorch takes zeros, composite classes insist on allocating their parameters at once, batch
norm keeps its averages beside the parameters. All of that ends here.

Batch norm (ResNet, RegNet) uses its running averages in training too, so that a loss does not depend on how a batch is
cut: the averages are part of the parameter tree, and `frozen` names them as never trained.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import flax.errors
import jax
import jax.numpy as jnp
from flax.core import unfreeze

from redco_cli.errors import MissingKeyError, ModelError
from redco_cli.models.bounds import Rows, check_call, check_masks, rows_of
from redco_cli.models.config.tasks import TO_SEQUENCE, flax_class_names
from redco_cli.models.flax.big_bird import cropped, drawing, for_inputs
from redco_cli.models.flax.dropping import dropping, with_layer_drop
from redco_cli.models.flax.generation import generate
from redco_cli.models.flax.limits import check_inputs
from redco_cli.models.flax.repairs import as_the_class_reads, repair_loaded_modules
from redco_cli.models.flax.trainable import frozen_paths, padding_untrained
from redco_cli.models.vocabulary import AddedTokens
from redco_cli.plugin.contract import IGNORED_LABEL, Loss, Params
from redco_cli.plugin.parts import next_token_loss

_WHOLE_OUTPUT = frozenset({"question_answering", "clip"})
_STATE = ("params", "past_key_values", "dropout_rng", "indices_rng")
_OPTIONS = ("train", "deterministic", "output_attentions", "output_hidden_states", "return_dict", "kwargs")
_NO_INPUTS = frozenset({*_STATE, *_OPTIONS, "freeze_feature_encoder"})
"""Parameters of a Flax class's call that are not for the plugin to give."""
_BUILD_ERRORS = (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError, NotImplementedError)


@dataclass(frozen=True, eq=False)
class HfFlaxModel:
    """A model run by its Flax class in transformers. Made by `resolve_model`.

    Attributes:
        config: the transformers config.
        task: which head it has, one of the tasks of the recipe.
        where: the place in the recipe that asked for it.
        flax: the transformers object; holds no parameters.
        generation_config: the transformers generation config; None when the class does not generate.
        abstract: the parameters as a nested dict of `jax.ShapeDtypeStruct`, float32.
        frozen: regular expressions over parameter paths (names joined by `/`) that training must leave alone.
        added: which rows of the vocabulary are those of tokens that the recipe adds; None where it adds none.
    """

    config: Any
    task: str
    where: str
    flax: Any = field(repr=False)
    generation_config: Any = field(repr=False)
    abstract: Params = field(repr=False)
    frozen: tuple[str, ...] = ()
    added: AddedTokens | None = None

    @property
    def rows(self) -> Mapping[str, Rows]:
        """Name of an input, or of labels, to the rows that there are for its values."""
        return rows_of(self.config, self.task, getattr(self.config, "max_position_embeddings", None))

    def init(self, rng: Any) -> Params:
        """Fresh float32 parameters from a key. Traceable: call it under `jit` to have them born sharded."""
        return _float32(unfreeze(self.flax.init_weights(rng, self.flax.input_shape)))

    def __call__(self, params: Params, *inputs: Any, rng: Any = None, train: bool = False, **named: Any) -> Any:
        """Applies the model.

        Args:
            params: as `init` returns them.
            inputs: the inputs in the order of the Flax class, such as `input_ids` [B, L]; `named` likewise by name.
                Images are [B, channels, height, width].
            rng: key for dropout.
            train: whether dropout is active.

        Returns:
            The logits of the head; of a text encoder hidden states [B, L, D]; of question answering and CLIP all.

        Raises:
            ModelError: an unknown or missing input, or one longer than the model's positions.
        """
        arguments = self._bind(inputs, named)
        check_inputs(self.config, arguments, self.where)
        check_call(self.rows, arguments, self.where)
        check_masks(arguments, self.where)
        switches = self._switches(train, rng)
        flax_model, arguments, length = for_inputs(self.flax, arguments, self.where)
        try:
            with padding_untrained(self.config), self._dropping(rng) if train else contextlib.nullcontext():
                outputs = flax_model(**arguments, params=params, return_dict=True, **switches)
        except flax.errors.InvalidRngError:
            raise MissingKeyError(
                self.where, "training this model needs a key for dropout", "pass rng= to ctx.model, as loss_fn got it"
            ) from None
        if length is not None:
            outputs = cropped(outputs, length, jnp.shape(arguments["input_ids"])[-1])
        if self.task in _WHOLE_OUTPUT:
            return outputs
        return outputs.last_hidden_state if self.task == "text_encoder" else outputs.logits

    def next_token_loss(self, params: Params, *inputs: Any, labels: Any, weights: Any = None, **named: Any) -> Loss:
        """The loss of predicting each token from those before it, where a call gives logits [B, L, V].

        Labels and weights [B, L] are aligned with the input; the other arguments are those of a call.
        """
        return next_token_loss(self(params, *inputs, **named), labels, weights)

    def decoder_inputs(self, labels: Any) -> Any:
        """Decoder inputs [B, L] for labels [B, L]: moved right by one, behind the start token.

        Ignored labels (-100) become padding. mBART starts with the language code that ends the labels instead.

        Raises:
            ModelError: the config names no start or pad token.
        """
        pad = self._special_id("pad_token_id")
        labels = jnp.where(labels == IGNORED_LABEL, pad, labels)
        if self.config.model_type == "mbart":
            last = jnp.maximum((labels != pad).sum(-1, keepdims=True) - 1, 0)
            start = jnp.take_along_axis(labels, last, axis=-1)
        else:
            start = jnp.full_like(labels[:, :1], self._special_id("decoder_start_token_id"))
        return jnp.concatenate([start, labels[:, :-1]], axis=-1)

    def generate(
        self, params: Params, inputs: Any, attention_mask: Any = None, *, rng: Any = None, **settings: Any
    ) -> Any:
        """Generates token ids [B, N] by greedy search, sampling or beam search; N is `max_new_tokens`.

        Args:
            params: as `init` returns them.
            inputs: prompt ids [B, L] padded on the left (causal models), source ids [B, L], pixel values, or features.
            attention_mask: [B, L], 1 for real tokens.
            rng: key for sampling.
            settings: fields of the recipe's `predict.generation`, and other settings of `GenerationConfig` that the
                decoder follows too; None leaves a setting to the model's generation config. `stop_strings` need
                `tokenizer`. Whisper also takes `language` and `task`.

        Returns:
            What `Model.generate` of the plugin guide promises.

        Raises:
            ModelError: the model does not generate, or not in the way asked for.
        """
        return generate(self, params, inputs, attention_mask, rng, settings)

    def _bind(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.flax.__call__).parameters
        order = [name for name in parameters if name not in _NO_INPUTS]
        unknown = sorted(set(named) - set(order))
        if unknown or len(inputs) > len(order):
            raise ModelError(
                self.where,
                f"{type(self.flax).__name__} takes no input {unknown[0]}" if unknown else "too many inputs are given",
                f"its inputs are: {', '.join(order)}",
            )
        arguments = {**dict(zip(order, inputs, strict=False)), **named}
        if order[0] not in arguments:
            raise ModelError(
                self.where, f"{type(self.flax).__name__} needs {order[0]}", f"its inputs are: {', '.join(order)}"
            )
        if self.task in TO_SEQUENCE and arguments.get("decoder_input_ids") is None:
            raise ModelError(
                self.where,
                f"{type(self.flax).__name__} needs decoder_input_ids",
                "make them with ctx.model.decoder_inputs(labels)",
            )
        if self.config.model_type == "electra" and arguments.get("token_type_ids") is None:
            arguments["token_type_ids"] = jnp.zeros(jnp.shape(arguments["input_ids"]), "i4")
        return arguments

    def _switches(self, train: bool, rng: Any) -> dict[str, Any]:
        """How this class is told to train: batch norm is never, see the top of the module."""
        parameters = inspect.signature(self.flax.__call__).parameters
        if "dropout_rng" not in parameters:
            return {}
        named: dict[str, Any] = {"deterministic": not train} if "deterministic" in parameters else {"train": train}
        if train and rng is not None:
            named |= {"dropout_rng": rng} | (drawing(rng) if "indices_rng" in parameters else {})
        return named

    def _dropping(self, rng: Any) -> contextlib.AbstractContextManager[Any]:
        return dropping(self.config, rng, self.where)

    def _special_id(self, name: str) -> int:
        value = getattr(self.generation_config, name, None)
        value = getattr(self.config, name, None) if value is None else value
        if value is None:
            raise ModelError(self.where, f"the config has no {name}", f"add {name} to the model's config")
        return int(value)


def build_model(
    config: Any,
    task: str,
    *,
    dtype: str,
    generation_config: Any,
    where: str,
    remat: Literal["none", "full"] = "none",
) -> HfFlaxModel:
    """The Flax model for a config; allocates nothing.

    Args:
        config: a transformers config, checked by `refusals`.
        task: one of the tasks its model type has.
        dtype: compute type; parameters are float32.
        generation_config: None for the one that the config implies.
        where: the place in the recipe, for errors.
        remat: `full` recomputes activations in the backward pass.

    Raises:
        ModelError: the class cannot be built from the config, or has no remat.
    """
    import transformers

    flax_class = getattr(transformers, flax_class_names(config.model_type)[task])
    repair_loaded_modules()
    _silence_deprecation()
    flax_config = as_the_class_reads(with_layer_drop(config))
    flax_model, abstract = _construct(flax_class, flax_config, jnp.dtype(dtype), where)
    if remat == "full":
        _enable_remat(flax_model, where)
    return HfFlaxModel(
        config=with_layer_drop(flax_model.config, like=config),
        task=task,
        where=where,
        flax=flax_model,
        generation_config=generation_config or flax_model.generation_config,
        abstract=abstract,
        frozen=frozen_paths(abstract, config),
    )


def _construct(flax_class: Any, config: Any, dtype: Any, where: str) -> tuple[Any, Params]:
    """The transformers object and its abstract parameters.

    It is constructed while tracing, so that its parameters are never computed: `_do_init=False`, made for that, is
    refused by the composite classes.
    """
    made: list[Any] = []
    # by default the decoder's inputs are as long as the encoded sound, which may be longer than its positions
    shape = {"input_shape": ((1, 1024), (1, 1))} if config.model_type == "speech-encoder-decoder" else {}

    def construct() -> Params:
        made.append(flax_class(config, dtype=dtype, **shape))
        return _float32(unfreeze(made[0].params))

    try:
        abstract = jax.eval_shape(construct)
    except (*_BUILD_ERRORS, flax.errors.FlaxError) as error:
        raise ModelError(
            where,
            f"{flax_class.__name__} cannot be built from this config: {' '.join(str(error).split())}",
            "correct the config: sizes must be positive, and heads must divide the hidden size",
        ) from None
    model = made[0]
    model._is_initialized = False
    del model._params, model.key
    return model, abstract


def _float32(params: Params) -> Params:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
    )


def _enable_remat(flax_model: Any, where: str) -> None:
    try:
        flax_model.enable_gradient_checkpointing()
    except NotImplementedError:
        raise ModelError(
            where, f"{type(flax_model).__name__} cannot recompute activations", "set train.remat: none"
        ) from None


class _NoDeprecation(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "TensorFlow and JAX classes are deprecated" not in record.getMessage()


def _silence_deprecation() -> None:
    """The version of transformers that has these classes is pinned: that they are deprecated is no news to a user."""
    logger = logging.getLogger("transformers.modeling_flax_utils")
    if not any(isinstance(existing, _NoDeprecation) for existing in logger.filters):
        logger.addFilter(_NoDeprecation())
