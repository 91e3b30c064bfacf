"""What plugin tests share: a context for a built-in plugin, and a model whose logits are its parameters."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from redco_cli.encoding.collate import encoded_rows
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.plugin.contract import Context, Loss
from redco_cli.plugin.parts import builtin, next_token_loss
from redco_cli.recipe.schema import Recipe

MakeContext = Callable[..., Context]


class LogitsModel:
    """Returns its parameters as logits, and remembers what it was called with."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, params: Any, *inputs: Any, **named: Any) -> Any:
        self.calls.append((inputs, named))
        return params

    def next_token_loss(self, params: Any, *inputs: Any, labels: Any, weights: Any = None, **named: Any) -> Loss:
        return next_token_loss(self(params, *inputs, **named), labels, weights)


@pytest.fixture
def context() -> MakeContext:
    def make(
        plugin: str,
        *,
        max_length: int = 16,
        stage: str = "train",
        model: Any = None,
        tokenizer: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> Context:
        recipe = Recipe.model_validate(
            {"plugin": {"module": plugin}, "data": {"max_length": max_length}, "output_dir": "runs/test", "seed": seed}
        )
        chosen = builtin(plugin).Options(**options)
        return Context(model, ByteTokenizer() if tokenizer is None else tokenizer, chosen, recipe, stage)

    return make


def collate(plugin: Any, ctx: Context, examples: Sequence[Any]) -> Any:
    """A batch of a plugin with an `encode_fn`, as the core makes it of examples that were not encoded before."""
    return plugin.collate_fn(ctx, encoded_rows(SimpleNamespace(file="p.py", encode_fn=plugin.encode_fn), ctx, examples))


@pytest.fixture
def logits_model() -> type[LogitsModel]:
    return LogitsModel
