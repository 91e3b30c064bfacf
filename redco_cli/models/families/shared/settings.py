"""A Hugging Face config as it is read for a decoder: what transformers reads and nobody here does is refused by name.

Whatever a family's reader asks for is honoured. What remains must be known not to matter to the logits, be switched
off, have the value that the config class gives it by default, or be a key that nothing in transformers reads either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from redco_cli.errors import ModelError
from redco_cli.models.known_keys import generation_keys, is_read

_REMEDY = "choose a model without this setting"


def named(names: str) -> frozenset[str]:
    """Names between blanks as a set."""
    return frozenset(names.split())


NO_MATTER = (
    named(
        """
        _name_or_path alibi architectures attention_dropout auto_map chunk_size_feed_forward classifier_dropout dtype
        finetuning_task
        gradient_checkpointing id2label init_std initializer_range is_decoder label2id max_position_embeddings
        model_type num_labels original_max_position_embeddings prefix problem_type return_dict sep_token_id
        task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript transformers_version use_alibi
        use_bfloat16
        """
    )
    | generation_keys()
)
"""What transformers reads of any config, and not to compute logits; generation refuses what it does not follow.

Dropout and ALiBi are among them because the check for fused attention asks every model: those that have them read them.
"""


class Settings:
    """The settings of one config, with a record of those that were read."""

    def __init__(self, config: Any, where: Callable[[str], str]) -> None:
        """Nothing is read yet.

        Args:
            config: a transformers config.
            where: a setting's name to its place, for errors.
        """
        self.family: str = config.model_type
        self._config = config
        self._where = where
        self._read: set[str] = set()
        self._ignored: list[str] = []

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value of a setting, which is thereby honoured; `default` where it is absent or None."""
        self._read.add(key)
        value = getattr(self._config, key, None)
        return default if value is None else value

    def unread(self, key: str) -> Any:
        """The value of a setting that stays to be honoured; None where it is absent."""
        return None if key in self._read else getattr(self._config, key, None)

    def size(self, key: str, default: int | None = None) -> int:
        """A setting that counts something.

        Raises:
            ModelError: it is not a positive number.
        """
        value = self(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(key, f"{key} must be a positive number, not {value!r}", f"correct {key}")
        return int(value)

    def padding_id(self, vocab_size: int) -> int | None:
        """`pad_token_id`, from the end of the vocabulary where it is negative; None where no token has it."""
        value = self("pad_token_id", None)
        known = isinstance(value, int) and not isinstance(value, bool) and -vocab_size <= value < vocab_size
        return value % vocab_size if known else None

    def number(self, key: str, default: float | None = None) -> float:
        """A setting that measures something.

        Raises:
            ModelError: it is not a number.
        """
        value = self(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.refuse(key, f"{key} must be a number, not {value!r}", f"correct {key}")
        return float(value)

    def each(self, key: str) -> list[Any]:
        """A setting that says something about each layer.

        Raises:
            ModelError: it is no list.
        """
        values = self(key)
        if not isinstance(values, list | tuple):
            self.refuse(key, f"{key} must be a list, not {values!r}", f"correct {key}")
        return list(values)

    def positive(self, key: str) -> float:
        """A setting that measures something, and by which is divided.

        Raises:
            ModelError: it is not a positive number.
        """
        value = self.number(key)
        if not value > 0:
            self.refuse(key, f"{key} must be above 0, not {value:g}", f"correct {key}")
        return value

    def maybe_positive(self, key: str) -> float | None:
        """A setting that measures something, by which is divided, or that is absent or None.

        Raises:
            ModelError: it is neither.
        """
        return None if self(key) is None else self.positive(key)

    def maybe_size(self, key: str) -> int | None:
        """A setting that counts something, or is absent or None.

        Raises:
            ModelError: it is neither.
        """
        return None if self(key) is None else self.size(key)

    def only(self, key: str, *values: Any, instead: str) -> None:
        """Refuses a setting with a value other than these.

        Args:
            key: its name.
            values: those that are computed as they mean; absent and None are always accepted.
            instead: what the decoder does whatever the value.

        Raises:
            ModelError: it has another value.
        """
        value = self(key)
        if value is not None and value not in values:
            self.refuse(key, f"{self.family} with {key}: {_shown(value)} is not supported: {instead}")

    def refuse(self, key: str, problem: str, remedy: str = _REMEDY) -> NoReturn:
        """Ends with an error at a setting's place.

        Raises:
            ModelError: always.
        """
        raise ModelError(self._where(key), problem, remedy)

    def ignore(self, key: str) -> None:
        """Notes a setting in a mapping of settings, `rope_scaling.finetuned`, that nothing in transformers reads."""
        self._ignored.append(key)

    def finish(self, irrelevant: frozenset[str]) -> list[str]:
        """Checks what was not read.

        Args:
            irrelevant: further settings that transformers reads, and that do not matter to this family's logits.

        Returns:
            The settings that are ignored, because nothing in transformers reads them.

        Raises:
            ModelError: a setting may matter, and is not honoured.
        """
        usual = type(self._config)().to_dict()
        for key, value in self._config.to_dict().items():
            if key in self._read or value is None or value == usual.get(key):
                continue
            if not is_read(self.family, key):
                self.ignore(key)
            elif key not in NO_MATTER | irrelevant and (value or key in usual):
                self.refuse(
                    key, f"{self.family} with {key}: {_shown(value)} is not supported: nothing here computes it"
                )
        return self._ignored


def _shown(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return text or str(value)
