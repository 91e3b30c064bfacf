import gc
import gzip
import json
import os
import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import datasets
import pytest

from redco_cli.data.source import load_source
from redco_cli.errors import DataError
from redco_cli.recipe.data import SourceSection

WRITTEN = [{"text": f"line {index}", "label": index % 3} for index in range(20)]
_CUT = "Expecting ',' delimiter at column 8"
REPAIR = "repair or replace the file, or leave it out"

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # `datasets` leaves csv files open


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """Files left open are closed before tests of other modules could be blamed."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The recipe's folder; the working directory is another one."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "recipes"


def load(folder, *, streaming=False, **source):
    return load_source(
        SourceSection(**source),
        "data.train",
        streaming=streaming,
        directory=folder,
        where=lambda key: f"recipes/x.yaml:9: {key}",
    )


def refusal(folder, **source):
    with pytest.raises(DataError) as error:
        list(load(folder, **source))
    return str(error.value)


def write_lines(path, examples=WRITTEN):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


# Places.


@pytest.mark.parametrize(
    ("form", "path", "expected"),
    [
        ("jsonl", "json", ["a:19", "a:20", "b:1"]),
        ("json", "json", ["a: row 19", "a: row 20", "b: row 1"]),
        ("csv", "csv", ["a: row 19", "a: row 20", "b: row 1"]),
        ("parquet", "parquet", ["a: row 19", "a: row 20", "b: row 1"]),
        ("txt", "text", ["a: row 19", "a: row 20", "b: row 1"]),
    ],
)
def test_an_example_has_its_place(folder, form, path, expected):
    _write(folder, "text" if form == "txt" else form)
    written = (folder / f"data.{form}").read_bytes()
    for name in "ab":
        (folder / f"{name}.{form}").write_bytes(written)
    rows = load(folder, path=path, data_files=["a.*", "b.*"], split="train[18:30]", limit=3)
    named = [f"{folder}/{place[0]}.{form}{place[1:]}" for place in expected]
    assert [rows.place(index) for index in range(3)] == named
    stream = load(folder, path=path, data_files=["a.*", "b.*"], streaming=True)
    assert [stream.place(number) for number in (18, 19, 20)] == named


def test_an_example_of_a_saved_dataset_has_its_row(folder):
    datasets.Dataset.from_list(WRITTEN).save_to_disk(folder / "saved")
    assert load(folder, path="saved", split="train[:5]+train[10:]").place(5) == "saved: row 11 of train"


# Text stays text.

DATED = [{"day": "1999-03-03", "at": {"times": ["12:30:00", "2000-01-01T01:02:03Z"]}, "n": n} for n in range(3)]


@pytest.mark.parametrize("streaming", [False, True])
def test_text_that_looks_like_a_date_stays_text(folder, streaming):
    write_lines(folder / "a.jsonl", DATED)
    write_lines(folder / "b.jsonl", [{**row, "day": "a day"} for row in DATED])
    (folder / "c.json").write_text(json.dumps(DATED, indent=1))
    for files in (["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"], ["c.json"]):
        rows = list(load(folder, path="json", data_files=files, streaming=streaming))
        assert [row["day"] for row in rows] == [
            "a day" if name == "b.jsonl" else "1999-03-03" for name in files for _ in range(3)
        ]
        assert all(row["at"] == DATED[0]["at"] for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_text_among_other_things_stays_text(folder, streaming):
    mixed = ["1", 3, None, "[1]", {"a": "2", "é": "ü\u2028"}, "true", "1999-03-03", 0.1 + 0.2]
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps({"x": value}) for value in mixed))
    rows = load(folder, path="json", data_files="a.jsonl", streaming=streaming)
    assert [row["x"] for row in rows] == mixed


# Formats.


def _write(folder, form):
    table = datasets.Dataset.from_list(WRITTEN)
    if form == "jsonl":
        write_lines(folder / "data.jsonl")
    elif form == "json":
        (folder / "data.json").write_text(json.dumps(WRITTEN, indent=1))
    elif form == "gz":
        (folder / "data.jsonl.gz").write_bytes(gzip.compress(write_lines(folder / "plain").read_bytes()))
    elif form == "csv":
        (folder / "data.csv").write_text("text,label\n" + "".join(f"{e['text']},{e['label']}\n" for e in WRITTEN))
    elif form == "parquet":
        table.to_parquet(folder / "data.parquet")
    elif form == "arrow":
        table.save_to_disk(folder / "saved")
    elif form == "text":
        (folder / "data.txt").write_text("".join(f"{e['text']}\n" for e in WRITTEN))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("form", "path", "files"),
    [
        ("jsonl", "json", "data.jsonl"),
        ("json", "json", "data.json"),
        ("gz", "json", "data.jsonl.gz"),
        ("csv", "csv", "data.csv"),
        ("parquet", "parquet", "data.parquet"),
        ("arrow", "arrow", "saved/*.arrow"),
        ("text", "text", "data.txt"),
    ],
)
def test_what_was_written_is_read(folder, form, path, files, streaming):
    _write(folder, form)
    expected = [{"text": example["text"]} for example in WRITTEN] if form == "text" else WRITTEN
    examples = load(folder, path=path, data_files=files, streaming=streaming)
    assert list(examples) == expected
    assert list(examples) == expected  # a second epoch
    assert hasattr(examples, "__len__") is not streaming


def test_rows_are_a_sequence_of_dicts(folder):
    write_lines(folder / "a.jsonl")
    rows = load(folder, path="json", data_files="a.jsonl")
    assert len(rows) == 20
    assert rows[3] == WRITTEN[3]
    assert rows[-1] == WRITTEN[-1]
    assert rows[2:5] == WRITTEN[2:5]
    assert rows.__getitems__([7, 1, 7]) == [WRITTEN[7], WRITTEN[1], WRITTEN[7]]
    with pytest.raises(IndexError):
        rows[20]


def test_rows_can_be_read_from_several_threads(folder):
    expected = [{"text": "x" * (index % 50), "ids": list(range(index % 30))} for index in range(2000)]
    write_lines(folder / "a.jsonl", expected)
    rows = load(folder, path="json", data_files="a.jsonl", split="train[:1500]+train[1500:]")

    def read(seed):
        indices = random.Random(seed).choices(range(2000), k=500)
        single = [rows[index] for index in indices]
        return single == rows.__getitems__(indices) == [expected[index] for index in indices]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(16)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_saved_dataset_is_read(folder, streaming):
    table = datasets.Dataset.from_list(WRITTEN)
    table.save_to_disk(folder / "single")
    table.select(range(3)).to_parquet(folder / "named.parquet")
    datasets.DatasetDict({"train": table, "test": table.select(range(15, 20))}).save_to_disk(folder / "both")
    assert list(load(folder, path="single", streaming=streaming)) == WRITTEN
    assert list(load(folder, path="both", split="test", streaming=streaming)) == WRITTEN[15:]


def test_a_split_saved_alone_goes_by_its_name_and_by_the_default(folder):
    named = datasets.Dataset.from_list(WRITTEN, split="validation")
    named.save_to_disk(folder / "named")
    assert list(load(folder, path="named")) == WRITTEN
    assert list(load(folder, path="named", split="validation[:2]")) == WRITTEN[:2]


def test_a_directory_of_data_files_is_read(folder):
    (folder / "made").mkdir()
    write_lines(folder / "made" / "train.jsonl")
    write_lines(folder / "made" / "test.jsonl", WRITTEN[:4])
    assert list(load(folder, path="made")) == WRITTEN
    assert list(load(folder, path="made", split="test")) == WRITTEN[:4]


# Splits and limits.


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:25%]", WRITTEN[:5]),
        ("train[90%:]", WRITTEN[18:]),
        ("train[3:5]+train[:1]", [*WRITTEN[3:5], WRITTEN[0]]),
        ("train[-2:]", WRITTEN[-2:]),
    ],
)
def test_slices(folder, split, expected):
    write_lines(folder / "a.jsonl")
    assert list(load(folder, path="json", data_files="a.jsonl", split=split)) == expected
    datasets.Dataset.from_list(WRITTEN).save_to_disk(folder / "saved")
    assert list(load(folder, path="saved", split=split)) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_limit(folder, streaming):
    write_lines(folder / "a.jsonl")
    for limit, expected in ((3, WRITTEN[:3]), (99, WRITTEN)):
        assert list(load(folder, path="json", data_files="a.jsonl", limit=limit, streaming=streaming)) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_split_lists_the_splits(folder, streaming):
    table = datasets.Dataset.from_list(WRITTEN)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(folder / "both")
    assert refusal(folder, path="both", split="tets", streaming=streaming) == (
        "recipes/x.yaml:9: data.train.split: tets given, but the splits of the data are: train, test\n"
        "  -> name one of these"
    )


def test_a_malformed_slice_is_refused(folder):
    write_lines(folder / "a.jsonl")
    assert refusal(folder, path="json", data_files="a.jsonl", split="train[:") == (
        "recipes/x.yaml:9: data.train.split: train[: given: Unrecognized instruction format: train[:\n"
        "  -> write train, train[:1000], train[10%:] or train+test"
    )
    assert refusal(folder, path="json", data_files="a.jsonl", split="test[:5]") == (
        "recipes/x.yaml:9: data.train.split: test given, but the splits of the data are: train\n"
        "  -> leave split out: files make one split"
    )
    assert refusal(folder, path="json", data_files="a.jsonl", split="train[8:3]") == (
        "recipes/x.yaml:9: data.train: holds no examples\n  -> check what the data is made from"
    )
    assert refusal(folder, path="json", data_files="a.jsonl", split="train[:5]", streaming=True) == (
        "recipes/x.yaml:9: data.train.split: train[:5] given, but data that is streamed has whole splits only\n"
        "  -> use limit, or data.streaming: false"
    )


# Where files are looked for.


def test_files_are_found_beside_the_recipe_first_and_then_in_the_working_directory(folder, tmp_path):
    write_lines(folder / "a.jsonl", WRITTEN[:1])
    write_lines(tmp_path / "cwd" / "a.jsonl", WRITTEN[:2])
    write_lines(tmp_path / "cwd" / "b.jsonl", WRITTEN[:3])
    assert len(load(folder, path="json", data_files="a.jsonl")) == 1
    assert len(load(folder, path="json", data_files="b.jsonl")) == 3
    assert len(load(folder, path="json", data_files=str(tmp_path / "cwd" / "a.jsonl"))) == 2
    assert len(load(folder, path="json", data_files=("b.jsonl", "a.jsonl"))) == 4


def test_patterns_are_sorted_and_brackets_in_a_name_are_no_pattern(folder):
    (folder / "x[1]").mkdir()
    for name, row in (("b", 1), ("a", 0), ("c", 2)):
        write_lines(folder / "x[1]" / f"{name}.jsonl", [WRITTEN[row]])
    (folder / "x[1]" / "d.jsonl").mkdir()
    assert list(load(folder / "x[1]", path="json", data_files="*.jsonl")) == WRITTEN[:3]
    assert list(load(folder, path="json", data_files="x[1]/b.jsonl")) == [WRITTEN[1]]


@pytest.mark.parametrize("pattern", ["none.jsonl", "none-*.jsonl"])
def test_a_pattern_that_matches_nothing_says_where_it_was_looked_for(folder, tmp_path, pattern):
    assert refusal(folder, path="json", data_files=pattern) == (
        f"recipes/x.yaml:9: data.train.data_files: {pattern} matches no file in {folder} or {tmp_path}/cwd\n"
        "  -> check the path; patterns look like data/*.jsonl"
    )


# What is no data.


def test_a_format_without_files_is_refused(folder):
    assert refusal(folder, path="json") == (
        "recipes/x.yaml:9: data.train.data_files: is missing, and json is read from files\n  -> name the files"
    )


def test_a_file_given_as_path_is_told_apart(folder):
    write_lines(folder / "a.jsonl")
    assert refusal(folder, path="a.jsonl") == (
        "recipes/x.yaml:9: data.train.path: a.jsonl is a file, but path names a format or a directory\n"
        "  -> write path: json and data_files: a.jsonl"
    )


def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(folder, tmp_path):
    assert refusal(folder, path="./some/where") == (
        f"recipes/x.yaml:9: data.train.path: ./some/where is no directory in {folder} or {tmp_path}/cwd, "
        "and no hub id\n"
        "  -> for files, path is one of json, csv, parquet, text, arrow"
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unreachable_hub_is_told(folder, streaming):
    remedy = "check the name and the network; HF_HUB_OFFLINE=1 allows only what was downloaded before"
    assert refusal(folder, path="some/dataset", streaming=streaming) == (
        "recipes/x.yaml:9: data.train.path: some/dataset is no local directory, and the Hugging Face hub cannot be "
        f"reached: Couldn't reach 'some/dataset' on the Hub (OfflineModeIsEnabled)\n  -> {remedy}"
    )
    assert refusal(folder, path="jsonl", streaming=streaming) == (
        "recipes/x.yaml:9: data.train.path: jsonl is no local directory, and the Hugging Face hub cannot be "
        "reached: Couldn't reach 'jsonl' on the Hub (OfflineModeIsEnabled)\n"
        f"  -> did you mean json? Otherwise {remedy}"
    )


def test_a_dataset_that_the_hub_does_not_have_is_told(folder, monkeypatch):
    def not_found(*_args, **_named):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/dataset' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", not_found)
    assert refusal(folder, path="some/dataset") == (
        "recipes/x.yaml:9: data.train.path: there is no dataset some/dataset on the Hugging Face hub, "
        "or it is private\n"
        "  -> check the name; for private and gated ones `hf auth login`"
    )


def test_a_missing_configuration_is_told(folder, monkeypatch):
    def unnamed(*_args, **_named):
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['en', 'fr']")

    monkeypatch.setattr(datasets, "load_dataset", unnamed)
    assert refusal(folder, path="some/dataset") == (
        "recipes/x.yaml:9: data.train.name: Config name is missing. "
        "Please pick one among the available configs: ['en', 'fr']\n  -> name one of these configurations"
    )


# Damage.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"a": 1}\n{"a": 2\n{"a": 3}\n', ":2: not JSON: Expecting ',' delimiter at column 8"),
        (b'{"a": 1}\n' * 30_000 + b'{"a":\n', ":30001: not JSON: Expecting value at column 6"),
        (b'{"a": 1}\n[1, 2]\n', ":2: holds a list, but an object is expected"),
        (b'{"a": 1}\n3\n', ":2: holds a number, but an object is expected"),
        (b'{"a": "\xff"}\n', ":1: not UTF-8: byte 0xff at position 7 of the line"),
        (b'[{"a": 1},\n{"a": 2]\n', ":2: not JSON: Expecting ',' delimiter at column 8"),
        (b'[{"a": 1},\n3]\n', ": item 1 is a number, but an object is expected"),
        (b'[\n{"a": "\xff"}]\n', ":2: not UTF-8: byte 0xff"),
    ],
)
def test_damaged_json_is_told_with_its_line(folder, content, fault, streaming):
    write_lines(folder / "good.jsonl", [{"a": 1}])
    (folder / "bad.jsonl").write_bytes(content)
    told = f"recipes/x.yaml:9: data.train.data_files: {folder}/bad.jsonl{fault}\n  -> {REPAIR}"
    assert refusal(folder, path="json", data_files="bad.jsonl", streaming=streaming) == told
    assert refusal(folder, path="json", data_files=("good.jsonl", "bad.jsonl"), streaming=streaming) == told


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"null", ":1: holds null, but an object is expected"),  # ends the process when `datasets` reads it
        (b"1\n2\n", ":1: holds a number, but an object is expected"),
        (b"[1, 2]", ": item 0 is a number, but an object is expected"),
        (b"[1, 2]\n[3, 4]\n", ":2: not JSON: Extra data at column 1"),
        (b"label,text\n1,a\n", ":1: not JSON: Expecting value at column 1"),
    ],
)
def test_json_that_holds_no_objects_is_refused_before_it_is_read(folder, content, fault):
    (folder / "bad.json").write_bytes(content)
    assert refusal(folder, path="json", data_files="bad.json") == (
        f"recipes/x.yaml:9: data.train.data_files: {folder}/bad.json{fault}\n"
        "  -> write one JSON object per line, or one list of objects"
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("form", "content", "reason"),
    [
        ("csv", b"a,b\n1,2\n1,2,3\n", "Error tokenizing data. C error: Expected 2 fields in line 3, saw 3"),
        ("csv", b"a,b\n1,\xff\n", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("text", b"a\n\xff\n", "'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
        (
            "parquet",
            None,
            "Parquet magic bytes not found in footer. Either the file is corrupted or this is not a parquet file.",
        ),
        ("arrow", b"junk" * 10, "Not an Arrow file"),
    ],
)
def test_a_damaged_file_is_named(folder, form, content, reason, streaming):
    good, bad = folder / f"good.{form}", folder / f"bad.{form}"
    table = datasets.Dataset.from_list([{"a": 1, "b": 2}] * 1000)
    if form == "parquet":
        table.to_parquet(good)
        content = good.read_bytes()[:-100]  # truncated
    elif form == "arrow":
        table.save_to_disk(folder / "saved")
        good.write_bytes(next((folder / "saved").glob("*.arrow")).read_bytes())
    else:
        good.write_text("a,b\n1,2\n")
    bad.write_bytes(content)
    told = f"recipes/x.yaml:9: data.train.data_files: {bad} cannot be read as {form}: {reason}\n  -> {REPAIR}"
    assert refusal(folder, path=form, data_files=bad.name, streaming=streaming) == told
    assert refusal(folder, path=form, data_files=(good.name, bad.name), streaming=streaming) == told


def test_files_that_do_not_fit_together_are_told(folder):
    write_lines(folder / "a.jsonl", [{"a": 1}])
    write_lines(folder / "b.jsonl", [{"b": 1}])
    assert refusal(folder, path="json", data_files=("a.jsonl", "b.jsonl")) == (
        "recipes/x.yaml:9: data.train.data_files: each file can be read, but not all together: Couldn't cast b: int64 "
        "a: int64 to {'a': Value('int64')} because column names don't match\n"
        "  -> give all files the same columns and types"
    )


def test_a_row_that_is_damaged_is_named_when_it_is_read(folder):
    features = datasets.Features({"image": datasets.Image()})
    pixel = datasets.Image().encode_example({"bytes": b"no image", "path": None})
    table = datasets.Dataset.from_dict({"image": [None, pixel]}, features=features)
    table.save_to_disk(folder / "images")
    rows = load(folder, path="images")
    assert rows[0] == {"image": None}
    for read in (lambda: rows[1], lambda: rows.__getitems__([0, 1])):
        with pytest.raises(DataError) as error:
            read()
        assert str(error.value).startswith(
            "recipes/x.yaml:9: data.train.path: example 1 cannot be read: cannot identify image file"
        )


# Emptiness.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["json", "csv", "text", "parquet", "arrow"])
def test_an_empty_file_is_named(folder, form, streaming):
    (folder / "empty").write_bytes(b"")
    assert refusal(folder, path=form, data_files="empty", streaming=streaming) == (
        f"recipes/x.yaml:9: data.train.data_files: {folder}/empty is empty\n  -> write examples to it, or leave it out"
    )


@pytest.mark.parametrize(("form", "content"), [("json", "\n\n"), ("json", "[]"), ("csv", "a,b\n")])
def test_files_without_examples_are_refused(folder, form, content):
    (folder / "empty").write_text(content)
    remedy = "check what the data is made from"
    assert refusal(folder, path=form, data_files="empty") == (
        f"recipes/x.yaml:9: data.train.data_files: holds no examples\n  -> {remedy}"
    )
    assert refusal(folder, path=form, data_files="empty", streaming=True) == (
        f"recipes/x.yaml:9: data.train: holds no examples\n  -> {remedy}"
    )


# Manners.


def test_nothing_is_written_to_the_terminal(folder):
    write_lines(folder / "a.jsonl")
    (folder / "bad.jsonl").write_text('{"a": 1\n')
    code = """
import pathlib
from redco_cli.data.source import load_source
from redco_cli.errors import DataError
from redco_cli.recipe.data import SourceSection
for name in ("a.jsonl", "bad.jsonl"):
    try:
        source = SourceSection(path="json", data_files=name)
        print(len(load_source(source, "data.train", streaming=False, directory=pathlib.Path("."), where=str)))
    except DataError as error:
        print(error)
"""
    quiet = {name: value for name, value in os.environ.items() if "PROGRESS" not in name}
    said = subprocess.run([sys.executable, "-c", code], cwd=folder, env=quiet, capture_output=True, text=True)
    assert said.stdout == f"20\ndata.train.data_files: bad.jsonl:1: not JSON: {_CUT}\n  -> {REPAIR}\n"
    assert said.stderr == ""


def test_importing_the_module_imports_no_heavy_library():
    code = "import sys, redco_cli.data.source; print({'datasets', 'jax', 'grain', 'pyarrow'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"
