"""`base/` in an output directory: the model that an adapter is trained for, where nothing else has it for good.

Its random numbers, or the checkpoint of another run that may delete it, are written once and not with every checkpoint,
in the form of one: whole or not at all, with a manifest. Beside its parameters it holds their digest.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import orbax.checkpoint as ocp

from redco_cli.errors import StorageError
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import shown
from redco_cli.runtime.peers.multihost import current_connection, process_allgather
from redco_cli.training.saving.files.integrity import find_damage
from redco_cli.training.saving.files.items import restored_items

BASE = "base"
"""The name of the directory."""
_SHORTER_RUN = re.compile(r"steps-\d+")


def digest_in(path: Path) -> str | None:
    """The digest of the parameters that a directory says it holds; None where it says nothing."""
    try:
        return str(json.loads((path / "meta" / "metadata").read_bytes())["digest"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def restored_base(checkpointer: ocp.AsyncCheckpointer, directory: Path, abstract: Params) -> Params:
    """The parameters in `base/`, born on the shardings of `abstract`. All processes must call it.

    Args:
        checkpointer: reads them.
        directory: of the run; one that a longer run has left behind has what the longer one has.
        abstract: ShapeDtypeStructs with shardings.

    Raises:
        StorageError: it is gone, damaged, or holds another model.
    """
    path = directory / BASE
    if _SHORTER_RUN.fullmatch(directory.name) and not path.is_dir():
        path = directory.parent / BASE
    others = current_connection()
    share = slice(None) if others is None else slice(others.process, None, others.processes)
    found = "it is gone" if not path.is_dir() else find_damage(path, (), share)
    problem = next((one for one in process_allgather("base", found) if one is not None), None)
    if problem is not None:
        told = f"holds the model that the adapter was trained for, and cannot be used: {problem}"
        raise StorageError(shown(path), told, f"restore it from a copy, beside the checkpoints of {shown(directory)}")
    restored: Params = restored_items(checkpointer, path, {"params": abstract}, ())["params"]
    return restored
