"""The decoder behind the interface of every named model: abstract parameters, init, apply, generate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from redco_cli.errors import MissingKeyError, ModelError
from redco_cli.models.bounds import Rows, check_call, check_masks, rows_of
from redco_cli.models.decoder.block import Remat
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.decoder import Decoder, abstract_params
from redco_cli.models.decoder.generate import check_rope, generate
from redco_cli.models.decoder.loss import cross_entropy, head_of
from redco_cli.models.decoder.masks import texts_by_position
from redco_cli.models.decoder.runs import layer_runs
from redco_cli.models.generate.settings import read_settings
from redco_cli.models.generate.stops import stops_of
from redco_cli.models.kernels.choice import Kernel, best_kernel
from redco_cli.models.vocabulary import AddedTokens
from redco_cli.plugin.contract import IGNORED_LABEL, Loss, Params

_EXPERTS = tuple(f"experts/{name}{part}" for name in ("gate", "up", "down") for part in ("", "_bias"))
"""Parameters that hold an array of each expert."""
_INPUTS = ("input_ids", "attention_mask", "position_ids", "segment_ids")

_calls: ContextVar[list[bool] | None] = ContextVar("calls", default=None)


@contextlib.contextmanager
def calls_with_segments() -> Iterator[list[bool]]:
    """Within it, of each call of a decoder that is traced, whether it was given `segment_ids`."""
    calls: list[bool] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@dataclass(frozen=True, eq=False)
class DecoderModel:
    """A decoder-only language model. Made by `build_decoder`.

    Attributes:
        config: the transformers config.
        task: `causal_lm` or `sequence_classification`.
        where: the place in the recipe that asked for it.
        module: the linen module; holds no parameters. `module.config` is the decoder's own config.
        generation_config: of transformers; None where none was saved.
        abstract: the parameters as a nested dict of `jax.ShapeDtypeStruct`, float32.
        frozen: empty: everything may be trained.
        added: which rows of the vocabulary are those of tokens that the recipe adds, if any.
    """

    config: Any
    task: str
    where: str
    module: Decoder = field(repr=False)
    generation_config: Any = field(repr=False)
    abstract: Params = field(repr=False)
    frozen: tuple[str, ...] = ()
    added: AddedTokens | None = None

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's own config."""
        config: DecoderConfig = self.module.config
        return config

    @property
    def rows(self) -> Mapping[str, Rows]:
        """Name of an input, or of labels, to the rows that there are for its values."""
        return rows_of(self.config, self.task, self.decoder.learned_positions or None)

    @property
    def packs(self) -> bool:
        """Whether several texts may share a row: it takes `segment_ids`."""
        return self.task == "causal_lm"

    @property
    def stacked(self) -> Mapping[str, int]:
        """Path of a parameter to how many of its first dims number layers and experts, where any do."""
        paths, runs = flatten_dict(self.abstract, sep="/"), {run.name for run in layer_runs(self.decoder)}
        return {path: 1 + path.endswith(_EXPERTS) for path in paths if path.partition("/")[0] in runs}

    def init(self, rng: Any) -> Params:
        """Fresh float32 parameters from a key. Traceable: call it under `jit` to have them born sharded."""
        return self.module.init(rng, jnp.zeros((1, 1), jnp.int32))["params"]

    def __call__(self, params: Params, *inputs: Any, rng: Any = None, train: bool = False, **named: Any) -> Any:
        """Logits [B, S, V], in the compute type; of a classifier [B, labels].

        Args:
            params: as `init` returns them.
            inputs: `input_ids` [B, S], `attention_mask` [B, S] with 1 for real tokens, `position_ids` [B, S] and
                `segment_ids` [B, S] for rows that hold several texts; in this order, or by name in `named`.
            rng: key for dropout.
            train: whether dropout is active.

        Raises:
            ModelError: an unknown or missing input, one longer than the model's positions, or no key for dropout.
        """
        return self._apply(params, "__call__", inputs, named, rng, train)

    def hidden(self, params: Params, *inputs: Any, rng: Any = None, train: bool = False, **named: Any) -> Any:
        """What the head takes [B, S, E]; arguments are those of a call."""
        return self._apply(params, "hidden", inputs, named, rng, train)

    def next_token_loss(
        self,
        params: Params,
        *inputs: Any,
        labels: Any,
        weights: Any = None,
        rng: Any = None,
        train: bool = False,
        **named: Any,
    ) -> Loss:
        """The loss of predicting each token from those before it, without logits of the whole batch.

        Args:
            params: as `init` returns them.
            inputs: those of a call; `named` likewise by name.
            labels: [B, S], aligned with `input_ids`: token i, or `IGNORED_LABEL` where it carries no loss.
            weights: [B, S], of each label; one each by default.
            rng: key for dropout.
            train: whether dropout is active.

        Returns:
            What `plugin.parts.next_token_loss` makes of the logits.
        """
        self._check_language_model("next_token_loss")
        hidden = self.hidden(params, *inputs, rng=rng, train=train, **named)
        following = jnp.concatenate([labels[:, 1:], jnp.full_like(labels[:, :1], IGNORED_LABEL)], axis=1)
        share = None if weights is None else jnp.roll(weights, -1, axis=1)  # the last has no label
        found = cross_entropy(hidden, head_of(params, self.decoder), following, share, config=self.decoder)
        return Loss(found.loss, found.weight, {"accuracy": found.correct})

    def decoder_inputs(self, labels: Any) -> Any:
        """A decoder without an encoder reads the labels themselves.

        Raises:
            ModelError: always.
        """
        raise ModelError(self.where, "a causal_lm model has no decoder_inputs", "give it input_ids in loss_fn")

    def generate(
        self, params: Params, inputs: Any, attention_mask: Any = None, *, rng: Any = None, **settings: Any
    ) -> Any:
        """Generates token ids [B, N] by greedy search, sampling or beam search; N is `max_new_tokens`.

        Compiled once for all calls with equal shapes and settings, also where the caller does not compile.

        Args:
            params: as `init` returns them.
            inputs: prompt ids [B, P], padded on either side.
            attention_mask: [B, P], 1 for real tokens; None for no padding. A row without real tokens gets padding only.
            rng: key for sampling.
            settings: fields of the recipe's `predict.generation`, with `stop_strings` also `tokenizer`; and other
                settings of `GenerationConfig` that are followed. None leaves one to the model's generation config.

        Returns:
            What `Model.generate` of the plugin guide promises.

        Raises:
            ModelError: a setting that is unknown, out of its range or not followed, prompts that are no [B, P] or have
                no positions for their outputs, or no key for sampling.
        """
        self._check_language_model("generate")
        check_call(self.rows, {"input_ids": inputs}, self.where)
        shape = jnp.shape(inputs)
        if len(shape) != 2 or 0 in shape:
            raise ModelError(self.where, f"prompts have shape {list(shape)}", "give input_ids of shape [B, P]")
        if attention_mask is not None and jnp.shape(attention_mask) != shape:
            raise ModelError(
                self.where,
                f"attention_mask has shape {list(jnp.shape(attention_mask))}, but input_ids {list(shape)}",
                "give them the same shape",
            )
        read = read_settings(self._generation_config(), settings, prompt=shape[1], where=self.where)
        self._check_length(shape[1] + read.max_new_tokens)
        check_rope(self.decoder, shape[1], read.max_new_tokens, self.where)
        if read.sample and rng is None:
            raise MissingKeyError(
                self.where, "sampling needs a key", "pass rng= to ctx.model.generate, as predict_fn got it"
            )
        mask = jnp.ones(shape, bool) if attention_mask is None else attention_mask
        key = rng if read.sample else None
        stops = stops_of(read.stops, settings.get("tokenizer"), self.where)
        return generate(params, inputs, mask, key, stops, module=self.module, settings=read)

    def _generation_config(self) -> Any:
        """The saved generation config, or what the model's config implies."""
        from transformers import GenerationConfig

        return self.generation_config or GenerationConfig.from_model_config(self.config)

    def _check_language_model(self, what: str) -> None:
        if self.decoder.num_labels:
            raise ModelError(self.where, f"a model that classifies has no {what}", "set model.task: causal_lm")

    def _check_length(self, length: int) -> None:
        limit = self.decoder.learned_positions
        if limit and length > limit:
            problem = (
                f"input_ids has {length} tokens, but the model has positions for {limit} (max_position_embeddings)"
            )
            remedy = "make sequences shorter: data.max_length, predict.generation.max_new_tokens"
            raise ModelError(self.where, problem, remedy)

    def _apply(
        self, params: Params, method: str, inputs: tuple[Any, ...], named: dict[str, Any], rng: Any, train: bool
    ) -> Any:
        given = self._bind(inputs, named)
        calls = _calls.get()
        if calls is not None:
            calls.append(given.get("segment_ids") is not None)
        config, segment_ids, position_ids = self.decoder, given.get("segment_ids"), given.get("position_ids")
        if segment_ids is None and given.get("attention_mask") is None and position_ids is not None:
            segment_ids = texts_by_position(position_ids) if config.restarts_separate else None
        dropout = train and any((config.embedding_dropout, config.attention_dropout, config.residual_dropout))
        if dropout and rng is None:
            remedy = "pass rng= to ctx.model, as loss_fn got it"
            raise MissingKeyError(self.where, "training this model needs a key for dropout", remedy)
        return self.module.clone(train=dropout).apply(
            {"params": params},
            given["input_ids"],
            given.get("attention_mask"),
            positions=position_ids,
            segment_ids=segment_ids,
            rngs={"dropout": rng} if dropout else {},
            method=method,
        )

    def _bind(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(named) - set(_INPUTS))
        if unknown or len(inputs) > len(_INPUTS):
            raise ModelError(
                self.where,
                f"the decoder takes no input {unknown[0]}" if unknown else "too many inputs are given",
                f"its inputs are: {', '.join(_INPUTS)}",
            )
        given = {**dict(zip(_INPUTS, inputs, strict=False)), **named}
        if given.get("input_ids") is None:
            raise ModelError(self.where, "the decoder needs input_ids", f"its inputs are: {', '.join(_INPUTS)}")
        if given.get("segment_ids") is not None and self.decoder.num_labels:
            raise ModelError(self.where, "a model that classifies takes one text a row", "leave out segment_ids")
        if given.get("position_ids") is None:
            self._check_length(jnp.shape(given["input_ids"])[-1])
        check_call(self.rows, given, self.where)
        check_masks(given, self.where)
        return given


def build_decoder(
    decoder: DecoderConfig,
    *,
    config: Any,
    dtype: str,
    generation_config: Any,
    where: str,
    remat: Remat = "none",
    kernel: Kernel | None = None,
    unroll: int = 1,
    layer_params: Callable[[Params], Params] | None = None,
) -> DecoderModel:
    """The decoder that a config describes; allocates nothing.

    Args:
        decoder: which parts it has.
        config: the transformers config that says so too, kept for generation and export.
        dtype: compute type; parameters are float32.
        generation_config: kept for generation.
        where: the place in the recipe, for errors.
        remat: what the backward pass recomputes.
        kernel: which code computes attention; default: `best_kernel`.
        unroll: how many layers the loop over layers has in its body.
        layer_params: see `Decoder`.
    """
    used = kernel or best_kernel(decoder.head_dim, dtype)
    module = Decoder(
        decoder, dtype=jnp.dtype(dtype), remat=remat, kernel=used, unroll=unroll, layer_params=layer_params
    )
    task = "sequence_classification" if decoder.num_labels else "causal_lm"
    return DecoderModel(config, task, where, module, generation_config, abstract_params(module))
