"""Which examples, encoded by which code with which tokenizer: where they are kept on disk."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redco_cli.data.mixture import Mixture
from redco_cli.data.reader import Rows as Read
from redco_cli.plugin.code.digests import encoding_code
from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.redaction import holds_secrets
from redco_cli.runtime.cache import cache_directory
from redco_cli.version import __version__


def kept_at(plugin: LoadedPlugin, ctx: Context, examples: Sequence[Example]) -> Path | None:
    """Where these examples are kept, encoded by this plugin with this tokenizer; None where that cannot be told."""
    data, code = identity_of(examples), encoding_code(plugin)
    if data is None or not code or holds_secrets(ctx.recipe.plugin.options):  # the digest would not know these
        return None
    recipe = ctx.recipe.model_dump(mode="json", include={"data": {"max_length"}, "model": True, "plugin": True})
    document = [_versions(), data, ctx.stage, recipe, code, _identity_of_tokenizer(ctx.tokenizer)]
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    return cache_directory().parent / "encoded" / digest.hexdigest()[:32]


def _versions() -> list[str]:
    return [__version__, *(importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2"))]


def _identity_of_tokenizer(processor: Any) -> Any:
    tokenizer = getattr(processor, "tokenizer", processor)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    templates = [str(getattr(one, "chat_template", None)) for one in (processor, tokenizer)]
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    if fast is not None:
        document = {**json.loads(fast.to_str()), "truncation": None, "padding": None}  # which calls leave behind
        return [kind, document, str(tokenizer.special_tokens_map), *templates]
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return [kind, sorted(vocabulary.items()), str(getattr(tokenizer, "special_tokens_map", None)), *templates]


def identity_of(examples: Sequence[Example]) -> str | None:
    """What `datasets` makes of the files and all that was done to them; None for a plugin's own examples."""
    if isinstance(examples, Mixture):
        parts = [identity_of(part.examples) for part in examples.parts]
        return None if None in parts else f"{parts} {examples.choice}"
    return str(examples.dataset._fingerprint) if isinstance(examples, Read) else None
