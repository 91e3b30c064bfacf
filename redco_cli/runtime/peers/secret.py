"""The secret of a run, by which its processes know each other: where it is from, and when none is needed.

`redco launch` makes one for its processes, and so do the files of `launch --emit`; elsewhere the user does. No
scheduler gives the processes of a job one that others cannot read. Imports no JAX.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from redco_cli.errors import UsageError
from redco_cli.runtime.peers.addresses import is_loopback

SECRET, INSECURE = "REDCO_SECRET", "REDCO_INSECURE"
_LEAST = 16  # characters: what is shorter can be guessed from what is overheard
_LINE = f'export {SECRET}=$(python3 -c "import secrets; print(secrets.token_hex(16))")'


def new_secret() -> str:
    """A secret for one run: 256 random bits, as text."""
    return secrets.token_hex(32)


def find_secret(environ: Mapping[str, str], host: str) -> bytes:
    """The secret of this run; empty where the processes meet without one.

    Args:
        environ: environment variables.
        host: of the coordinator, without brackets.

    Raises:
        UsageError: none is set, and the processes may be on several machines; or what is set is none.
    """
    given, insecure = environ.get(SECRET), environ.get(INSECURE, "0")
    if insecure not in ("0", "1"):
        raise UsageError(f"environment {INSECURE}", f"{insecure!r} is neither 0 nor 1", f"unset it, or set {SECRET}")
    if given is not None and len(given) < _LEAST:
        problem = "is empty" if not given else f"has {len(given)} characters, which can be guessed"
        raise UsageError(f"environment {SECRET}", problem, f"make one, and give it to all processes alike: {_LINE}")
    if given is None and insecure == "0" and not is_loopback(host):
        problem = f"is not set, and whoever reaches {host} could take part in this run, end it or read what it says"
        remedy = f"make one, and give its value to all processes alike: {_LINE}\n"
        remedy += f"     or, on a network that nobody else can reach: export {INSECURE}=1"
        raise UsageError(f"environment {SECRET}", problem, remedy)
    return b"" if given is None else os.fsencode(given)


def insecure_warning(secret: bytes, host: str) -> str | None:
    """What to say where processes of several machines meet without a secret."""
    if secret or is_loopback(host):
        return None
    return f"{INSECURE}=1: whoever reaches {host} can take part in this run, end it or read what it says"


def describe_secret(environ: Mapping[str, str], host: str | None) -> str:
    """Whether there is one, never what it is.

    Args:
        environ: environment variables.
        host: of the coordinator; None for a process alone.
    """
    try:
        secret = find_secret(environ, host or "localhost")
    except UsageError as error:
        return f"{error.problems[0].where.removeprefix('environment ')} {error.problems[0].problem}"
    if secret:
        return f"{SECRET} is set"
    if host is not None and not is_loopback(host):
        return f"not set; accepted by {INSECURE}=1"
    return "not set; needed for processes on several machines only"
