"""What PyTorch trains of a model and what it does not, kept the same in its Flax class.

The Flax classes train what PyTorch keeps as a buffer (running averages, sinusoidal positions, the bias of the logits),
and the embedding of the padding token (of its position too, in RoBERTa's kind), whose gradient
`torch.nn.Embedding(padding_idx=...)` leaves at zero. Where that token is one of the text (Pegasus and Marian begin
every target with it), this is no small thing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.models.flax.limits import OFFSET_POSITIONS
from redco_cli.plugin.contract import Params

_WORDS = frozenset({"shared", "embed_tokens", "word_embeddings"})
"""What the classes call the embedding of tokens."""
_POSITIONS = "position_embeddings"
"""What the classes that count positions from the id of padding call their embedding."""
_WITHOUT_PADDING_ROW = frozenset({"bloom", "clip", "clip_text_model", "gpt2", "gptj", "gpt_neo", "longt5", "mt5", "t5"})
"""Types whose PyTorch class trains the embedding of padding like any other."""
_PARTS = {"encoder": "encoder", "decoder": "decoder", "text_model": "text_config"}
"""First name of a path in a model of several parts to the config of that part."""


def frozen_paths(abstract: Params, config: Any) -> tuple[str, ...]:
    """Regular expressions over the paths of parameters that PyTorch does not train.

    Args:
        abstract: the parameters of the Flax class.
        config: the transformers config.
    """
    averages = ("batch_stats/.*",) if "batch_stats" in abstract else ()
    sinusoids = ("model/encoder/embed_positions/.*",) if config.model_type == "whisper" else ()
    paths = ("/".join(str(key.key) for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract))
    return averages + sinusoids + tuple(path for path in paths if path.endswith("final_logits_bias"))


def padding_untrained(config: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it, the embedding of a padding token gets no gradient where PyTorch gives it none.

    Args:
        config: the transformers config of the class that is called.
    """

    def intercepted(call: Callable[..., Any], args: Any, named: Any, context: Any) -> Any:
        found, module = call(*args, **named), context.module
        if not isinstance(module, nn.Embed) or context.method_name != "__call__":
            return found
        padding = _padding_id(config, module.path, module.name)
        if padding is None:
            return found
        ids = args[0] if args else named["inputs"]
        return jnp.where((ids == padding)[..., None], jax.lax.stop_gradient(found), found)

    context: contextlib.AbstractContextManager[Any] = nn.intercept_methods(intercepted)
    return context


def _padding_id(config: Any, path: tuple[str, ...], name: str | None) -> int | None:
    """The id of the row that PyTorch leaves alone in an embedding, in the part of the model that a path leads to."""
    part = getattr(config, _PARTS.get(path[0], ""), None) if path else None
    inner = config if part is None else part
    if name not in _WORDS and (name != _POSITIONS or inner.model_type not in OFFSET_POSITIONS):
        return None
    return None if inner.model_type in _WITHOUT_PADDING_ROW else inner.pad_token_id
