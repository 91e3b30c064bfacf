"""Data is told from other data by its content, wherever it lies, and no file is read twice for that."""

import dataclasses
import datetime
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redco_cli.data.digests import CACHE_NAME, FileDigests, alike, example_digests, source_digests, value_digest
from redco_cli.errors import DataError
from redco_cli.recipe.data import SourceSection

ROWS = "".join(f'{{"text": "row {i}"}}\n' for i in range(203))


def settle(*files: Path) -> None:
    """Makes files as old as those that nobody is about to write again."""
    for file in files:
        os.utime(file, (1_700_000_000, 1_700_000_000))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("train", "more"):
        (tmp_path / f"data/{name}.jsonl").write_text(ROWS)
        settle(tmp_path / f"data/{name}.jsonl")
    return tmp_path


def digests(project: Path, examples: Any = (), **source: Any) -> dict[str, str]:
    section = SourceSection(**{"path": "json", "data_files": "data/train.jsonl", **source})
    with FileDigests(project / "run") as known:
        return source_digests(section, examples, project, known)


@pytest.mark.parametrize(
    "changed",
    [
        "".join(ROWS.splitlines(keepends=True)[:150]),
        "".join(ROWS.splitlines(keepends=True)[::-1]),
        ROWS.replace("row 117", "row 118"),
    ],
    ids=["fewer rows", "reversed", "one row"],
)
def test_another_content_is_other_data(project: Path, changed: str) -> None:
    before = digests(project)
    assert list(before) == ["train.jsonl"]
    file, status = project / "data/train.jsonl", (project / "data/train.jsonl").stat()
    file.write_text(changed)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times
    assert digests(project) != before
    file.write_text(ROWS)
    assert digests(project) == before


def test_several_files_count_by_name_and_in_their_order(project: Path) -> None:
    before = digests(project, data_files="data/*.jsonl")
    assert list(before) == ["more.jsonl", "train.jsonl", "order of files"]
    assert (
        digests(project, data_files=["data/train.jsonl", "data/more.jsonl"])["order of files"]
        != before["order of files"]
    )
    for number in range(64):
        (project / f"data/{number}.jsonl").write_text(ROWS)
    assert list(digests(project, data_files="data/*.jsonl")) == ["66 files"]


def test_nothing_is_read_twice_not_even_where_all_was_moved(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = digests(project), FileDigests._read
    moved = project.with_name(f"{project.name}-moved")
    project.rename(moved)
    monkeypatch.setattr(FileDigests, "_read", lambda *_: pytest.fail("it is read again"))
    assert digests(moved) == before
    monkeypatch.setattr(FileDigests, "_read", read)
    text = (moved / "run" / CACHE_NAME).read_text()
    assert str(moved) not in text
    for torn in ("", "[]", "{", text[:-9], '{"../data/train.jsonl": 1}', '{"../data/train.jsonl": [1, 2, 3, 4]}'):
        (moved / "run" / CACHE_NAME).write_text(torn)
        assert digests(moved) == before


def test_a_file_that_was_just_written_is_not_trusted_to_stay(project: Path) -> None:
    """Two writes in one tick of the clock give a file the same times."""
    file = project / "data/train.jsonl"
    file.write_text(ROWS)
    os.utime(file, (time.time(), time.time()))
    digests(project)
    assert not (project / "run" / CACHE_NAME).exists()


def test_a_file_that_cannot_be_read_is_an_error(project: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read: No such file"):
        source_digests(SourceSection(path="folder"), (), project, Gone(project / "run"))


class Gone(FileDigests):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        folder = directory.parent / "folder"
        folder.mkdir()
        (folder / "gone.jsonl").symlink_to(folder / "there")
        (folder / "there").write_text(ROWS)

    def of(self, files: Any) -> list[str]:
        (files[0].parent / "there").unlink()
        return super().of(files)


def test_a_folder_counts_by_its_files_but_not_the_output_in_it(project: Path) -> None:
    before = digests(project, path=".", data_files=None)
    assert set(before) == {"train.jsonl", "more.jsonl", "order of files"}
    (project / "run/metrics.jsonl").write_text("{}")
    (project / "data/.hidden").write_text("")
    assert digests(project, path=".", data_files=None) == before
    (project / "data/train.jsonl").write_text(ROWS[:-1])
    assert digests(project, path=".", data_files=None) != before


def test_of_a_saved_dataset_the_splits_that_are_used_count(project: Path) -> None:
    for split in ("train", "test"):
        (project / "saved" / split).mkdir(parents=True)
        (project / "saved" / split / "data.arrow").write_text(split)
    (project / "saved/dataset_dict.json").write_text("{}")
    of_train = digests(project, path="saved", data_files=None, split="train[:10%]")
    assert list(of_train) == ["data.arrow"]
    assert len(digests(project, path="saved", data_files=None, split="train+test")) == 3


def test_data_from_a_hub_counts_by_its_commit_and_a_sample(project: Path) -> None:
    class Rows(list[Any]):
        dataset = SimpleNamespace(
            cache_files=[{"filename": "/home/me/.cache/org___name/default/0.0.0/abc/train.arrow"}]
        )

    def of(rows: list[Any]) -> dict[str, str]:
        return digests(project, Rows(rows), path="org/name", data_files=None)

    before = of([{"x": 1}, {"x": 2}])
    assert list(before) == ["version", "number of examples", "examples"]
    Rows.dataset.cache_files[0]["filename"] = "/elsewhere/org___name/default/0.0.0/abc/train.arrow"
    assert of([{"x": 1}, {"x": 2}]) == before
    assert of([{"x": 2}, {"x": 1}])["examples"] != before["examples"]
    Rows.dataset.cache_files[0]["filename"] = "/elsewhere/org___name/default/0.0.0/abd/train.arrow"
    assert of([{"x": 1}, {"x": 2}])["version"] != before["version"]


@dataclasses.dataclass
class Point:
    x: Any
    y: int = 0


VALUES: list[Any] = [
    *(
        None,
        True,
        2,
        -3,
        1.0,
        float("nan"),
        "",
        "text",
        b"text",
        [],
        [1],
        [[1]],
        [1, 2],
        [2, 1],
        {},
        {"a": 1},
        {"b": 1},
    ),
    *({"a": [1]}, {1}, Point(1), Point(2), datetime.date(2026, 1, 1), 1j, np.zeros(3), np.zeros(3, np.float32)),
    *(np.zeros((3, 1)), np.arange(3), np.array(["a"]), np.array(["a", None]), object(), SimpleNamespace()),
]


def test_values_that_differ_have_other_digests() -> None:
    found = [value_digest(value) for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found == [value_digest(value) for value in VALUES]


def test_equal_values_have_the_same_digest() -> None:
    assert value_digest({"a": 1, "b": 2}) == value_digest({"b": 2, "a": 1})
    assert value_digest({"x": np.float32([1, 2])}) == value_digest({"x": np.float32([[1, 3], [2, 4]])[:, 0]})
    assert value_digest((1, np.int64(2))) == value_digest([1, 2])
    assert value_digest({"a", "b", "c"}) == value_digest({"c", "b", "a"})
    assert value_digest(Path("/a")) == value_digest("/a")


def test_of_many_examples_the_number_and_a_sample_count() -> None:
    rows = [{"x": i} for i in range(100_000)]
    before = example_digests(rows, Path())
    assert before["number of examples"] == "100000"
    for other in (rows[:-1], rows[::-1], [{"x": i + 1} for i in range(100_000)]):
        assert example_digests(other, Path()) != before


def test_examples_that_are_drawn_anew_count_by_their_number() -> None:
    """Augmented as they are read, say."""

    class Augmented(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return random.random()

    assert example_digests(Augmented(range(9)), Path()) == {"number of examples": "9"}


def test_of_a_stream_the_first_examples_count() -> None:
    class Stream:
        def __init__(self, first: int) -> None:
            self.first = first

        def __iter__(self) -> Iterator[dict[str, int]]:
            yield from ({"x": i} for i in range(self.first, self.first + 10**9))

    assert (
        example_digests(Stream(0), Path()) == example_digests(Stream(0), Path()) != example_digests(Stream(1), Path())
    )


def test_an_example_that_cannot_be_read_is_left_to_training() -> None:
    class Damaged(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise DataError("row 3", "is damaged")

    assert example_digests(Damaged([1, 2]), Path())["examples"] == "DataError"


def test_paths_in_examples_may_move_with_the_project(tmp_path: Path) -> None:
    found = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "image.png").write_text("")
        found.append(example_digests([{"image": str(tmp_path / place / "image.png")}], tmp_path / place)["examples"])
    other = example_digests([{"image": str(tmp_path / "one/image.png")}], tmp_path / "two")["examples"]
    assert found[0] != found[1]
    assert alike(*found)
    assert alike(found[0], other)  # the plugin was moved, the data was not
    assert not alike(found[1], other)


@pytest.mark.slow
def test_no_change_of_a_file_keeps_its_digest(project: Path) -> None:
    """Bytes changed, cut off, put in or exchanged at random, a kept digest at hand."""
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed: {seed}")
    dice, file = random.Random(seed), project / "data/train.jsonl"
    content = file.read_bytes()
    known = digests(project)
    assert json.loads((project / "run" / CACHE_NAME).read_text())
    for _ in range(500):
        at, length = dice.randrange(len(content)), dice.randrange(1, 40)
        changed = content[:at] + dice.choice([b"", dice.randbytes(length)]) + content[at + length :]
        file.write_bytes(changed)
        settle(file)
        assert (digests(project) == known) == (changed == content)
