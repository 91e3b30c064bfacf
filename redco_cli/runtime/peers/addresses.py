"""Where process 0 listens, at no more addresses than the others need, and where they look for it. Imports no JAX."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant, judged by the text alone, so that all processes judge alike.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.5", "::1", "10.0.0.1", "node1", "0.0.0.0")]
    [True, True, True, False, False, False]
    """
    if host.lower().rstrip(".") in _LOCAL_NAMES:
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return False


def listening_address(host: str) -> str:
    """The one address of this machine that a coordinator's name stands for; empty for all of its addresses.

    Args:
        host: of the coordinator, without brackets.
    """
    found = _resolved(host)
    if is_loopback(host):
        return next((address for address in found if ":" not in address), found[0] if found else "127.0.0.1")
    # A name that leads to loopback here, as Debian has it of a machine's own name, leads elsewhere on other machines.
    if any(is_loopback(address) for address in found):
        return ""
    # Of several, the other machines may know any one only: a name in DNS, all interfaces by nss-myhostname here.
    own = {address for address in found if _is_own(address)}
    return own.pop() if len(own) == 1 else ""


def reached_address(host: str) -> str:
    """Where to connect to a coordinator: its name, or on this machine alone the one address at which it listens.

    `localhost` may resolve to `::1` first, where another program can listen at the same port.

    Args:
        host: of the coordinator, without brackets.
    """
    return listening_address(host) if is_loopback(host) else host


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return [str(address[0]) for *_, address in found]


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if address in ("0.0.0.0", "::"):  # noqa: S104 - recognised, in order not to listen at it
        return False
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
