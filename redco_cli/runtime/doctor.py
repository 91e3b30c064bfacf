"""What this machine offers to a run: versions, devices, processes, caches, extras."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import jax

from redco_cli.chips.compiler import accepted_options
from redco_cli.runtime.cache import cache_directory
from redco_cli.runtime.peers.cluster import detect_cluster
from redco_cli.runtime.peers.secret import describe_secret
from redco_cli.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "datasets", "numpy")
EXTRAS = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "digits": "sklearn",
    "privacy": "jax_privacy",
    "rl": "gymnasium",
}


def examine() -> dict[str, Any]:
    """The findings, as plain data for `console.result`."""
    devices = jax.devices()
    memory = {str(device): _memory(device) for device in jax.local_devices()}
    return {
        "redco": __version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "host": {"system": platform.platform(), "cores": os.cpu_count()},
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "local": len(jax.local_devices()),
            "memory": {name: size for name, size in memory.items() if size is not None} or "not reported",
        },
        "compiler options": _options(),
        "processes": _processes(),
        "secret": _secret(),
        "caches": {
            "compiled programs": str(os.environ.get("JAX_COMPILATION_CACHE_DIR", cache_directory())),
            "hugging face": os.environ.get("HF_HOME", "~/.cache/huggingface"),
        },
        "extras": {
            name: "installed" if importlib.util.find_spec(module) else f'missing: pip install "redco[{name}]"'
            for name, module in EXTRAS.items()
        },
    }


def _options() -> dict[str, Any] | str:
    """What `train.xla: auto` comes to here."""
    options, unknown = accepted_options("auto", lambda key: key)
    said = ", ".join(unknown)
    return {**options, **({"unknown to the compiler here": said} if unknown else {})} or "none by train.xla: auto"


def _processes() -> str:
    """What `redco train` would take this process for, without meeting the others."""
    cluster = detect_cluster(os.environ)
    return "1: the environment names no others" if cluster is None else str(cluster)


def _secret() -> str:
    """Whether the processes of a run would know each other by one."""
    cluster = detect_cluster(os.environ)
    return describe_secret(os.environ, None if cluster is None else cluster.host)


def _memory(device: Any) -> str | None:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return f"{limit / 2**30:.1f} GiB" if limit else None
