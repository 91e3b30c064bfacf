"""Which messages there are between the processes of a run, and what each holds. Imports no JAX.

What comes is measured before it is parsed, and compared with this table before anybody looks at it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
Check = Callable[[Any], bool]
LARGEST = 2**26
"""Bytes of a message, 64 MiB: the values of all processes, gathered."""
FIRST = 2**16
"""Bytes of a message to process 0 before all have met."""
SHOWN = 3
"""How many of the differences between two processes are told."""
MOST_SECONDS = 1e9
"""Seconds that a process may ask to be waited for."""
_DEEPEST = 32  # lists and objects within each other
_LONGEST = 10_000  # characters of a text
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ProtocolError(ValueError):
    """What came is no message of a process of this run; the text says why."""


def readable(text: str) -> str:
    """A text as it can be sent: cut where it is very long, and without halves of characters, as in odd file names."""
    return text[:_LONGEST].encode(errors="replace").decode()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_code(value: Any) -> bool:
    return type(value) is int and 0 <= value < 256


def _is_seconds(value: Any) -> bool:
    return (type(value) is int or (type(value) is float and math.isfinite(value))) and 0 <= value <= MOST_SECONDS


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and readable(value) == value


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_digest(one) for pair in value.items() for one in pair)


def _is_few(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= SHOWN and all(map(_is_digest, value))


def _is_differing(value: Any) -> bool:
    """Of some processes: which, digests of the names of some keys, and how many more there are."""
    return isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 3 and _is_count(one[0]) and _is_few(one[1]) and _is_count(one[2])
        for one in value
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_anything(_value: Any) -> bool:
    return True


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


TO_SERVER: Mapping[str, Mapping[str, Check]] = {
    "hello": {
        "process": _is_count,
        "processes": _is_count,
        "at": _is_text,
        "seconds": _is_seconds,
        "facts": _is_digest,
        "devices": _or_none(_is_digest),
        "stopped": _or_none(_is_text),
        "code": _is_code,
    },
    "alive": {},
    "differs": {"keys": _is_few, "more": _is_count},
    "gather": {"name": _is_text, "value": _is_anything},
    "stop": {"code": _is_code},
    "frozen": {"point": _is_count},
    "leave": {"peaceful": _is_flag, "code": _is_code, "reason": _is_text},
}
"""What a process may say to the server: the fields of each, all of them required."""

TO_PROCESS: Mapping[str, Mapping[str, Check]] = {
    "alive": {},
    "go": {},
    "compare": {"facts": _is_table},
    "refused": {"problem": _is_text, "remedy": _is_text, "code": _is_code, "differing": _is_differing},
    "gathered": {"name": _is_text, "values": _is_list},
    "freeze": {"code": _is_code, "process": _is_count},
    "stop_at": {"point": _is_count},
    "lost": {"reason": _is_text},
    "left": {"process": _is_count, "peaceful": _is_flag, "code": _is_code, "reason": _is_text},
}
"""What the server may say to a process."""


def encode(message: Message) -> bytes:
    """A message as bytes.

    Raises:
        ProtocolError: nobody would take it: too large, too deep, or with a number that is none.
    """
    try:
        payload = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise ProtocolError(str(error)) from None
    if len(payload) > LARGEST:
        raise ProtocolError(f"{len(payload)} bytes, where at most {LARGEST} are taken")
    _measure(payload)
    return payload


def decode(payload: bytes, table: Mapping[str, Mapping[str, Check]]) -> Message:
    """The message that some bytes are.

    Args:
        payload: of an allowed size.
        table: which messages there are: `TO_SERVER` or `TO_PROCESS`.

    Raises:
        ProtocolError: they are none of these.
    """
    _measure(payload)
    try:
        message = json.loads(payload, parse_constant=_finite, parse_float=_finite)
    except ProtocolError:
        raise
    except (ValueError, RecursionError):
        raise ProtocolError("no JSON") from None
    op = message.get("op") if isinstance(message, dict) else None
    fields = table.get(op) if isinstance(op, str) else None
    if fields is None:
        raise ProtocolError("no message that is known")
    wrong = sorted(message.keys() ^ {"op", *fields}) or [name for name in fields if not fields[name](message[name])]
    if wrong:
        raise ProtocolError(f"{op} with missing, unknown or impossible fields: {', '.join(wrong)[:100]!r}")
    return dict(message)


def _measure(payload: bytes) -> None:
    """Refuses what is so deep that parsing it would fail; brackets within texts do not count."""
    depth = 0
    for part in _PARTS.finditer(payload):
        first = payload[part.start()]
        depth += 1 if first in b"[{" else -1 if first in b"]}" else 0
        if depth > _DEEPEST:
            raise ProtocolError(f"lists within lists, more than {_DEEPEST} deep")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ProtocolError(f"{text[:20]} is no number")
    return number
