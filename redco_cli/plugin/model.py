"""What `ctx.model` offers a plugin, whatever is behind it."""

from __future__ import annotations

from typing import Any, Protocol

from redco_cli.plugin.contract import Loss, Params


class Model(Protocol):
    """What `ctx.model` offers, whatever is behind it."""

    config: Any
    """The Hugging Face config; None for a model from `build_model`."""

    def __call__(self, params: Params, *inputs: Any, rng: Any = None, train: bool = False, **named: Any) -> Any:
        """Applies the model.

        Args:
            params: as `init` returns them.
            inputs: the model's inputs in its own order, such as `input_ids` [B, L]; `named` likewise by name.
            rng: key for dropout, needed when `train` is true and the model has dropout.
            train: whether dropout is active.

        Returns:
            The logits of the task's head (language modelling: [B, L, V]); where a head has several outputs
            (question answering, CLIP), its output object; for a module from `build_model`, what it returns.
        """
        ...

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
        """The loss of a language model, with the metric `accuracy`: each token predicted from those before it.

        The same as `parts.next_token_loss` of the logits of a call. A model that can do without the logits of the
        whole batch does: for a large vocabulary they can be larger than the model.

        Args:
            params: as `init` returns them.
            inputs: those of a call; `named` likewise by name.
            labels: [B, L], aligned with the input: token i, or `IGNORED_LABEL` where it carries no loss.
            weights: [B, L], how much each label counts; one each by default: Σ w loss / Σ w.
            rng: key for dropout.
            train: whether dropout is active.
        """
        ...

    def init(self, rng: Any) -> Params:
        """Fresh parameters, float32. Traceable: call it under `jit` to have them born sharded."""
        ...

    def decoder_inputs(self, labels: Any) -> Any:
        """Decoder inputs [B, L] for labels [B, L] of an encoder-decoder model: moved right by one, behind the start id.

        Ignored labels become padding.

        Raises:
            ModelError: the model has no decoder of its own, or names no start or pad id.
        """
        ...

    def generate(
        self, params: Params, inputs: Any, attention_mask: Any = None, *, rng: Any = None, **settings: Any
    ) -> Any:
        """Generates token ids.

        Args:
            params: as `init` returns them.
            inputs: where the model starts: prompt ids [B, L] (causal models: padded on the left), source ids [B, L],
                or an encoder's pixel values or features.
            attention_mask: [B, L], 1 for real tokens.
            rng: key for sampling.
            settings: fields of the recipe's `predict.generation`; with `stop_strings` also `tokenizer`.

        Returns:
            Token ids [B, N] of the output alone, without the prompt, padded after the end with the pad id (the end id
            when there is none). With `num_samples` above 1 [B, num_samples, N]. With `log_probs` a dict: `ids`,
            `log_probs` of the same shape, the log-probability of each token given all before it, by the model itself,
            whatever the settings made of it (0 behind the end), and `lengths`, how many tokens there are up to the end.

        Raises:
            ModelError: when the model does not generate, or not in the way asked for.
        """
        ...
