"""A Hugging Face config as it is read for a decoder: what nobody reads, and what is not as usual, is refused by name.

Whatever a family's reader asks for is honoured. What remains must be known not to matter to the logits, be switched
off, or have the value that the config class gives it by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from redco_cli.errors import ModelError

_REMEDY = "choose a model without this setting"


def named(names: str) -> frozenset[str]:
    """Names between blanks as a set."""
    return frozenset(names.split())


_NO_MATTER = named(
    """
    _name_or_path _attn_implementation_autoset architectures auto_map chunk_size_feed_forward dtype finetuning_task
    id2label initializer_range init_std is_decoder label2id max_length max_position_embeddings model_type
    original_max_position_embeddings output_attentions _flash_attn_2_enabled
    output_hidden_states prefix problem_type pretraining_tp return_dict task_specific_params tf_legacy_loss
    tokenizer_class torch_dtype torchscript transformers_version unsloth_version unsloth_fixed use_bfloat16 use_cache
    gradient_checkpointing transformers.js_config
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id cls_token_id
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """
)
"""What no decoder of transformers reads to compute logits."""


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

    def finish(self, irrelevant: frozenset[str]) -> None:
        """Checks what was not read.

        Args:
            irrelevant: further settings that do not matter to this family.

        Raises:
            ModelError: a setting may matter, and is not honoured.
        """
        usual = type(self._config)().to_dict()
        known = self._read | _NO_MATTER | irrelevant
        for key, value in self._config.to_dict().items():
            if key in known or value == usual.get(key) or (key not in usual and not value):
                continue
            self.refuse(key, f"{self.family} with {key}: {_shown(value)} is not supported: nothing here computes it")


def _shown(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return text or str(value)
