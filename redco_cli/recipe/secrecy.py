"""Which options are secrets, by their names: `api_key`, `hfToken`, `db_password`.

Words such as `password` say so anywhere in a name. `key` and `token` mean other things as a rule (`sort_key`,
`label_key`, `pad_token`, `max_tokens`): they say so only after a word that says whose or what for. A value that is
wrongly taken for a secret no longer tells two runs apart; one that is wrongly not is written to disk.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OWNERS = (
    "access|account|admin|anthropic|api|app|auth|authentication|authorization|aws|azure|bearer|client|deploy|discord|gcp|"
    "github|gitlab|google|groq|hf|hub|huggingface|jwt|kaggle|master|oauth|openai|pinecone|private|replicate|secret|service|"
    "slack|subscription|telegram|wandb"
)
_KEYS = "aes|decryption|encryption|gpg|hmac|license|licence|pgp|rsa|signing|ssh|ssl|tls"
_TOKENS = "bot|csrf|login|personal|refresh|session|sso"
_ALWAYS = re.compile(
    r"(?:passcode|passphrase|passwd|password|pwd|secret|credential)s?(?:_|$)|(?:^|_)(?:bearer|creds)(?:_|$)"
)
"""Words that say so anywhere in a name, also glued to the one before: `dbpassword`."""
_OWNED = re.compile(rf"(?:(?:{_OWNERS}|{_KEYS})_?keys?|(?:{_OWNERS}|{_TOKENS})_?tokens?)(?:_|$)")
_REVERSED = re.compile(rf"tokens?_(?:{_OWNERS}|{_TOKENS})")
_ABOUT = re.compile(r"_(?:column|count|env|field|file|length|limit|path|size|type|variable)$")
"""Last words of what is no key or token, but says something of one: `api_key_env`."""
_COUNTED = re.compile(r"(?:keys|tokens)$")


def says_secret(name: str, parent: str = "") -> bool:
    """Whether the name of an option says that its value is a secret.

    Args:
        name: of the option.
        parent: of the mapping that holds it, which may say whose key it is: `openai: {key: ...}`.

    >>> [says_secret(name) for name in ("api_key", "hfToken", "db-passwords", "dbpassword", "token")]
    [True, True, True, True, True]
    >>> [says_secret(name) for name in ("max_tokens", "pad_token", "label_key", "tokenizer", "api_key_env")]
    [False, False, False, False, False]
    >>> says_secret("key"), says_secret("key", "openai")
    (False, True)
    """
    return any(map(_says, _forms(name, parent)))


def may_count(name: str, parent: str = "") -> bool:
    """Whether a number under a name that says secret may be how many there are, or something of that kind: `tokens`."""
    forms = [form for form in _forms(name, parent) if _says(form)]
    return all(_ABOUT.search(form) or (_COUNTED.search(form) and not _ALWAYS.search(form)) for form in forms)


def is_secret(key: str) -> bool:
    """Whether any part of a dotted key says so; what a model of `models` is called says nothing."""
    parts = parts_of(key)
    return any(says_secret(name, parent) for parent, name in zip(["", *parts], parts, strict=False))


def parts_of(key: str) -> list[str]:
    """The parts of a dotted key that may say something of its value."""
    parts = key.split(".")
    return [parts[0], *parts[2:]] if parts[0] == "models" else parts


def _forms(name: str, parent: str) -> Iterator[str]:
    """A name as its words in small letters, `hf_token`: with the parent's too, and as one word where cases mislead."""
    words, before = _words(name), _words(parent)
    yield "_".join(words)
    if words and before:
        yield "_".join((*before, *words))
    if len(words) > 1 and _says("".join(words)):
        yield "".join(words)


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=4096)
def _says(form: str) -> bool:
    if _ALWAYS.search(form) or form in ("token", "tokens") or _REVERSED.fullmatch(form):
        return True
    return _OWNED.search(form) is not None and _ABOUT.search(form) is None
