"""Whether a checkpoint still holds what was written: sizes and checksums of its files, kept among them.

`write_manifest` writes `manifest.json` when every other file is there and before the directory gets its name, in the
thread that commits: training goes on. `find_damage` compares, before anything is restored. Both read each byte once, a
few files at a time: CRC-32 takes 2.5 GiB/s on one core, so the disk decides, and what `find_damage` has read is in the
page cache when it is restored. A CRC-32 misses no damage of up to 32 bits in a row, and any other with a probability
of 2**-32.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from redco_cli.errors import StorageError
from redco_cli.recipe.load import shown

MANIFEST_NAME = "manifest.json"
Checksum = tuple[int, int]
"""Bytes and CRC-32 of a file."""
_NOT_LISTED = (MANIFEST_NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that are in no manifest: itself, and what orbax writes after it; nothing is restored from those."""
_ALL = slice(None)
_CHUNK = 4 << 20
_THREADS = 4


def write_manifest(directory: Path) -> None:
    """Writes the manifest of a complete checkpoint, and all of its files to the disk itself.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="redco-manifest") as pool:
        checksums = dict(pool.map(lambda name: (name, _checksum(directory / name, sync=True)), _names(directory)))
    with (directory / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        json.dump({"files": checksums}, file)
        file.flush()
        os.fsync(file.fileno())


def find_damage(directory: Path, items: Collection[str] = (), share: slice = _ALL) -> str | None:
    """What is wrong with a checkpoint, in a few words; None when every file is as it was written.

    Args:
        directory: of the checkpoint.
        items: look only at the files below these names; default: at all.
        share: of their sorted names, those whose bytes are read; sizes are looked at of all.

    Raises:
        StorageError: a file may not be read: that is no damage.
    """
    try:
        return _find_damage(directory, items, share)
    except PermissionError as error:
        name = shown(Path(error.filename or directory))
        raise StorageError(name, "cannot be read: no permission", "correct the permissions") from error
    except OSError as error:
        return f"{Path(error.filename or directory).name} cannot be read: {error.strerror or error}"


def _find_damage(directory: Path, items: Collection[str], share: slice) -> str | None:
    try:
        written = _read_manifest(directory / MANIFEST_NAME)
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST_NAME} is no manifest"

    def is_asked(name: str) -> bool:
        return not items or name.partition("/")[0] in items

    wanted, there = filter(is_asked, written), set(filter(is_asked, _names(directory)))
    names = sorted(wanted)
    for name in names:
        if name not in there:
            return f"{name} is missing"
        size = (directory / name).stat().st_size
        if size != written[name][0]:
            return f"{name} has {size} bytes of {written[name][0]}"
    for name in sorted(there.difference(names)):
        return f"{name} was added"
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="redco-check") as pool:
        found = pool.map(lambda name: _checksum(directory / name), names[share])
        changed = [name for name, checksum in zip(names[share], found, strict=True) if checksum != written[name]]
    return f"{changed[0]} holds other bytes than were written" if changed else None


def _read_manifest(path: Path) -> Mapping[str, Checksum]:
    files = json.loads(path.read_bytes())["files"]
    return {str(name): (int(size), int(checksum)) for name, (size, checksum) in files.items()}


def _names(directory: Path) -> list[str]:
    """Every file that a manifest lists, relative; hidden ones, which file managers and networks leave, are not."""
    files = (path for path in directory.rglob("[!.]*") if path.is_file())
    names = (path.relative_to(directory).as_posix() for path in files)
    return sorted(name for name in names if name not in _NOT_LISTED)


def _checksum(path: Path, *, sync: bool = False) -> Checksum:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(file.fileno())
    return size, checksum
