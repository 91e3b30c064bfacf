"""Data files as people have them: the message names the file, and the line where there are lines."""

import gc
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet
import pytest

RECIPE = """plugin: {module: plugin.py}
data: {train: {path: json, data_files: train.jsonl}}
train: {global_batch_size: 4, steps: 4, optimizer: sgd, schedule: constant, max_grad_norm: null}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""
LINES = "".join(json.dumps({"x": [i, 1.0], "y": i % 3}) + "\n" for i in range(8))
CSV = ["data.train.path=csv", "data.train.data_files=train.csv"]
PARQUET = ["data.train.path=parquet", "data.train.data_files=train.parquet"]


def parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"x": [[1.0, 2.0]] * 8, "y": [0] * 8}), file)
    return file.getvalue()


@dataclass(frozen=True)
class Case:
    """A file, overrides, and the whole error."""

    error: str
    content: str | bytes | None = LINES
    name: str = "train.jsonl"
    overrides: Sequence[str] = ()


CASES = {
    "no file": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl matches no file in FOLDER\n"
            "  -> check the path; patterns look like data/*.jsonl"
        ),
        None,
    ),
    "a pattern that matches nothing": Case(
        (
            "command line: data.train.data_files: data/*.jsonl matches no file in FOLDER\n"
            "  -> check the path; patterns look like data/*.jsonl"
        ),
        None,
        overrides=["data.train.data_files=data/*.jsonl"],
    ),
    "an empty file": Case(
        ("recipe.yaml:2: data.train.data_files: train.jsonl is empty\n  -> write examples to it, or leave it out"), ""
    ),
    "blank lines": Case(
        ("recipe.yaml:2: data.train.data_files: holds no examples\n  -> check what the data is made from"), "\n\n"
    ),
    "a line that is no JSON": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl:9: not JSON: Expecting ',' delimiter at "
            "column 17\n"
            "  -> repair or replace the file, or leave it out"
        ),
        LINES + '{"x": [1, 2, "y": 0}\n',
    ),
    "a line that is no object": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl:9: holds a list, but an object is "
            "expected\n"
            "  -> repair or replace the file, or leave it out"
        ),
        LINES + "[1, 2]\n",
    ),
    "a text": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl:1: not JSON: Expecting value at column 1\n"
            "  -> write one JSON object per line, or one list of objects"
        ),
        "x y\n1 2\n",
    ),
    "a line cut off": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl:8: not JSON: Expecting property name "
            "enclosed in double quotes at column 16\n"
            "  -> repair or replace the file, or leave it out"
        ),
        LINES[:-8],
    ),
    "latin-1": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl:9: not UTF-8: byte 0xe9 at position 23 of "
            "the line\n"
            "  -> repair or replace the file, or leave it out"
        ),
        LINES.encode() + '{"x": [1, 2], "y": "café"}\n'.encode("latin-1"),
    ),
    "an archive cut off": Case(
        (
            "command line: data.train.data_files: train.jsonl.gz cannot be read as json: Compressed file "
            "ended before the end-of-stream marker was reached\n"
            "  -> repair or replace the file, or leave it out"
        ),
        gzip.compress(LINES.encode())[:-12],
        "train.jsonl.gz",
        ["data.train.data_files=train.jsonl.gz"],
    ),
    "csv: rows of unequal length": Case(
        (
            "command line: data.train.data_files: train.csv cannot be read as csv: Error tokenizing "
            "data. C error: Expected 2 fields in line 3, saw 3\n"
            "  -> repair or replace the file, or leave it out"
        ),
        "x,y\n1,2\n1,2,3\n",
        "train.csv",
        CSV,
    ),
    "csv: only a head": Case(
        ("command line: data.train.data_files: holds no examples\n  -> check what the data is made from"),
        "x,y\n",
        "train.csv",
        CSV,
    ),
    "parquet: cut off": Case(
        (
            "command line: data.train.data_files: train.parquet cannot be read as parquet: Parquet magic "
            "bytes not found in footer. Either the file is corrupted or this is not a parquet file.\n"
            "  -> repair or replace the file, or leave it out"
        ),
        parquet()[:300],
        "train.parquet",
        PARQUET,
    ),
    "parquet: read as JSON": Case(
        (
            "command line: data.train.data_files: train.parquet:1: not UTF-8: byte 0xf0 at position 26 "
            "of the line\n"
            "  -> write one JSON object per line, or one list of objects"
        ),
        parquet(),
        "train.parquet",
        ["data.train.data_files=train.parquet"],
    ),
    "a split that there is not": Case(
        (
            "command line: data.train.split: validation given, but the splits of the data are: train\n"
            "  -> leave split out: files make one split"
        ),
        overrides=["data.train.split=validation"],
    ),
    "a slice that is none": Case(
        (
            "command line: data.train.split: train[:x] given: Unrecognized instruction format: train[:x]\n"
            "  -> write train, train[:1000], train[10%:] or train+test"
        ),
        overrides=["data.train.split=train[:x]"],
    ),
    "an empty slice": Case(
        ("recipe.yaml:2: data.train: holds no examples\n  -> check what the data is made from"),
        overrides=["data.train.split=train[:0]"],
    ),
    "a missing column": Case(
        (
            'plugin.py:24: collate_fn: collate_fn raised KeyError at `y = np.array([e["y"] for e in '
            "examples])`: 'y'\n"
            "  on 8 examples, the first with keys x, label\n"
            "  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
        ),
        LINES.replace('"y"', '"label"'),
    ),
    "text among numbers": Case(
        (
            "plugin.py: collate_fn: batch['y'] has dtype <U21, which no device can hold\n"
            "  -> turn text into token ids, and rows of unequal length into one padded array"
        ),
        LINES.replace('"y": 1', '"y": "one"'),
    ),
    "null among numbers": Case(
        (
            "plugin.py: collate_fn: batch['y'] has dtype object, which no device can hold\n"
            "  -> turn text into token ids, and rows of unequal length into one padded array"
        ),
        LINES.replace('"y": 1', '"y": null'),
    ),
    "a number that no device can hold": Case(
        (
            "plugin.py: collate_fn: batch['y'] holds 99999999999, which does not fit int32\n"
            "  -> scale the values, or drop what the model does not read"
        ),
        LINES.replace('"y": 1', '"y": 99999999999'),
    ),
    "evaluation without data": Case(
        (
            "command line: eval.every: there is no eval data\n"
            "  -> add data.eval, or let load_examples(ctx, 'eval') return examples"
        ),
        overrides=["eval.every=2"],
    ),
    "evaluation of a missing file": Case(
        (
            "command line: data.eval.data_files: eval.jsonl matches no file in FOLDER\n"
            "  -> check the path; patterns look like data/*.jsonl"
        ),
        overrides=["data.eval.path=json", "data.eval.data_files=eval.jsonl", "eval.every=2"],
    ),
    "no files named": Case(
        ("command line: data.train.data_files: is missing, and json is read from files\n  -> name the files"),
        overrides=["data.train.data_files=null"],
    ),
    "a file for a format": Case(
        (
            "command line: data.train.path: train.jsonl is a file, but path names a format or a "
            "directory\n"
            "  -> write path: json and data_files: train.jsonl"
        ),
        overrides=["data.train.path=train.jsonl"],
    ),
    "a folder that there is not": Case(
        (
            "command line: data.train.path: ./data is no directory in FOLDER, and no hub id\n"
            "  -> for files, path is one of json, csv, parquet, text, arrow"
        ),
        overrides=["data.train.path=./data"],
    ),
    "epochs of a stream": Case(
        (
            "command line: train.steps: 1 epoch given: the data has no known length, so epochs cannot be "
            "counted; give steps\n"
            "  -> give a number of steps"
        ),
        overrides=["data.streaming=true", "train.steps=1 epoch"],
    ),
    "a slice of a stream": Case(
        (
            "command line: data.train.split: train[:2] given, but data that is streamed has whole splits "
            "only\n"
            "  -> use limit, or data.streaming: false"
        ),
        overrides=["data.streaming=true", "data.train.split=train[:2]"],
    ),
    "a stream with a line that is no JSON": Case(
        (
            "recipe.yaml:2: data.train.data_files: train.jsonl:9: not JSON: Expecting value at column 6\n"
            "  -> repair or replace the file, or leave it out"
        ),
        LINES + '{"x": \n',
        overrides=["data.streaming=true"],
    ),
}
SLOWLY = (
    *("a text", "a line that is no object", "a slice that is none", "blank lines", "a split that there is not"),
    *("null among numbers", "parquet: read as JSON", "parquet: cut off"),
)
"""Found where others that are no slow tests are."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets leaves a refused csv open
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOWLY else name for name in CASES]
)
def test_data_is_refused(folder, name: str) -> None:
    case = CASES[name]
    folder.plugin(("def load_examples", "def unused"))
    folder.write(recipe__yaml=RECIPE)
    if case.content is not None:
        (folder.root / case.name).write_bytes(
            case.content if isinstance(case.content, bytes) else case.content.encode()
        )
    refused = folder.refused("train", "recipe.yaml", *case.overrides)
    gc.collect()  # the file that datasets left open is closed within this test, which expects the warning
    assert refused == case.error
