"""Examples from files, saved datasets and the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_cli.data.examples import Examples, check_examples
from redco_cli.data.files import as_patterns, check_files, find_files, find_path, searched
from redco_cli.data.mixed.lengths import expected_length
from redco_cli.data.reader import FILE_FORMATS, Reader, Rows, library
from redco_cli.data.resumable import ResumableStream
from redco_cli.data.verbatim import READ_ALIKE
from redco_cli.errors import DataError
from redco_cli.recipe.data import SourceSection

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def load_source(
    source: SourceSection,
    key: str,
    *,
    streaming: bool,
    directory: Path,
    where: Callable[[str], str],
    tell: Callable[[str], None] = lambda _text: None,
) -> Examples:
    """The examples of one dataset.

    Args:
        source: the recipe's section.
        key: its dotted key, `data.train`.
        streaming: read as it comes, with no known length.
        directory: the recipe's folder; relative paths start there, or else in the working directory.
        where: dotted key to its place in the recipe.
        tell: takes a line for the user, when a stream cannot be continued where it was left.

    Returns:
        A sequence of dicts, or when streaming an iterable of dicts that starts afresh each time. Either raises a
        `DataError` when a damaged example is met later.

    Raises:
        DataError: the data is missing, cannot be reached, is damaged or empty, or has no such split.
    """

    def place(field: str) -> str:
        return where(f"{key}.{field}")

    reader = Reader(source, place, _files(source, directory, place) if source.path in FILE_FORMATS else ())
    splits = _open(reader, streaming, directory)
    if not streaming:
        dataset, slices = _split(splits, reader)
        if source.limit is not None:
            dataset = dataset.select(range(min(source.limit, len(dataset))))
        return check_examples(Rows(dataset, reader, slices), where(key))
    dataset = _streamed_split(splits, reader)

    def expected() -> int | None:
        saved = splits[source.split]
        told = (source.split, source.path, reader.files)
        found = len(saved) if hasattr(saved, "__len__") else expected_length(dataset, *told)
        return found if source.limit is None else min(source.limit, found or source.limit)

    stream = ResumableStream(
        dataset if source.limit is None else dataset.take(source.limit),
        lambda: reader.explained("an example cannot be read"),
        tell,
        lambda number: reader.example_place(number, source.split),
        expected,
    )
    return check_examples(stream, where(key))


def _files(source: SourceSection, directory: Path, place: Callable[[str], str]) -> list[str]:
    patterns = _patterns(source)
    if not patterns:
        raise DataError(place("data_files"), f"is missing, and {source.path} is read from files", "name the files")
    files = find_files(patterns, directory, place("data_files"))
    check_files(files, json=source.path == "json", where=place("data_files"))
    return files


def _patterns(source: SourceSection) -> list[str]:
    return [source.data_files] if isinstance(source.data_files, str) else list(source.data_files or ())


def _open(reader: Reader, streaming: bool, directory: Path) -> Mapping[str, Any]:
    """Split name to dataset."""
    source = reader.source
    local = None if reader.files else _directory(reader, directory)
    with reader.explained("cannot be loaded"):
        if local is not None and ((local / "dataset_dict.json").exists() or (local / "state.json").exists()):
            return _saved_splits(library().load_from_disk(str(local)))
        opened: Mapping[str, Any] = library().load_dataset(
            str(local or source.path),
            source.name,
            **(READ_ALIKE if source.path == "json" else {}),
            data_files=as_patterns(reader.files) or _patterns(source) or None,
            revision=source.revision,
            streaming=streaming,
        )
        return opened


def _directory(reader: Reader, directory: Path) -> Path | None:
    """The local directory that `path` names; None when it can only be on the hub."""
    path = reader.source.path
    local = find_path(path, directory)
    if local is not None and local.is_file():
        suffix = local.suffix.removeprefix(".").replace("jsonl", "json")
        form = suffix if suffix in FILE_FORMATS else "text"
        remedy = f"write path: {form} and data_files: {path}"
        raise DataError(reader.place("path"), f"{path} is a file, but path names a format or a directory", remedy)
    if local is None and not _HUB_ID.fullmatch(path):
        problem = f"{path} is no directory in {searched(directory)}, and no hub id"
        raise DataError(reader.place("path"), problem, f"for files, path is one of {', '.join(FILE_FORMATS)}")
    return local


def _saved_splits(saved: Any) -> Mapping[str, Any]:
    # A dataset saved without its siblings is found by its own split name and by the default of `split`.
    return saved if isinstance(saved, Mapping) else {"train": saved, str(saved.split or "train"): saved}


def _split(splits: Mapping[str, Any], reader: Reader) -> tuple[Any, list[tuple[str, range]]]:
    """The rows of a split, of a slice of one, or of a sum of them; and the splits and numbers that these are."""
    spec = reader.source.split
    _check_splits(re.findall(r"(?:^|\+)\s*([^\[+\s]+)", spec), splits, reader)
    try:
        instruction = library().ReadInstruction.from_spec(spec)
        parts = instruction.to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        remedy = "write train, train[:1000], train[10%:] or train+test"
        raise DataError(reader.place("split"), f"{spec} given: {error}", remedy) from None
    slices = [(part.splitname, range(part.from_, part.to)) for part in parts]
    return library().concatenate_datasets([splits[name].select(part) for name, part in slices]), slices


def _streamed_split(splits: Mapping[str, Any], reader: Reader) -> Any:
    spec = reader.source.split
    if "[" in spec or "+" in spec:
        problem = f"{spec} given, but data that is streamed has whole splits only"
        raise DataError(reader.place("split"), problem, "use limit, or data.streaming: false")
    _check_splits([spec], splits, reader)
    dataset = splits[spec]
    return dataset.to_iterable_dataset() if hasattr(dataset, "to_iterable_dataset") else dataset  # of those saved


def _check_splits(names: Sequence[str], splits: Mapping[str, Any], reader: Reader) -> None:
    for name in names:
        if name not in splits:
            problem = f"{name} given, but the splits of the data are: {', '.join(splits)}"
            remedy = "leave split out: files make one split" if reader.files else "name one of these"
            raise DataError(reader.place("split"), problem, remedy)
