"""The built-in byte tokenizer as files that transformers loads: same ids, and the same chat template as jinja.

Unlike the built-in one, what transformers loads takes the letters `<eos>` in a text for the end token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redco_cli.models.config.byte_tokenizer import BOS, EOS, PAD, SEP

_SPECIALS = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>", SEP: "<sep>"}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def save_byte_tokenizer(directory: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": text, **flags} for number, text in _SPECIALS.items()]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(one["id"]): {key: one[key] for key in one if key != "id"} for one in added},
        "pad_token": _SPECIALS[PAD],
        "bos_token": _SPECIALS[BOS],
        "eos_token": _SPECIALS[EOS],
        "sep_token": _SPECIALS[SEP],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _letters() -> list[str]:
    """The letter that stands for each byte in the vocabulary of byte-level tokenizers.

    Bytes that are visible in Latin-1 stand for themselves, the others for letters from 256 on.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
