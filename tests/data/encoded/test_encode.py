"""Texts encoded once: what is kept on disk, read back, counted, refused; and the rows made of them."""

import numpy as np
import pytest

from redco_cli.data.encoded.encode import encoded_once
from redco_cli.data.encoded.rows import Rows
from redco_cli.errors import DataError, ExampleError, PluginError

IGNORED = -100
TEXTS = [{"ids": [1, 2, 3]}, {"ids": [4, 5, 6, 7, 8]}, {"ids": [9]}, {"ids": []}, {"ids": None}]


def encode(example):
    if example["ids"] is None:
        return None
    ids = np.array(example["ids"], np.int32)
    return {"input_ids": ids, "labels": np.where(ids % 2 == 1, ids, IGNORED).astype(np.int32)}


def encoded(directory=None, examples=TEXTS, function=encode):
    return encoded_once(
        function, examples, measure="input_ids", where="p.py: encode_fn", kept_at=directory, done=lambda *_: None
    )


def rows(overflow="truncate", *, packed, found=None):
    return Rows(found or encoded(), 4, overflow, packed=packed, ignored=IGNORED)


def test_what_was_encoded_is_read_from_disk(tmp_path):
    first = encoded(tmp_path / "kept")
    assert sorted(path.name for path in tmp_path.rglob("*.bin")) == ["input_ids.bin", "labels.bin"]

    changed = (tmp_path / "kept/labels.bin").stat().st_mtime_ns
    again, in_memory = encoded(tmp_path / "kept"), encoded()
    assert (tmp_path / "kept/labels.bin").stat().st_mtime_ns == changed
    for number in range(len(TEXTS)):
        for one in (first, again):
            assert {name: field.tolist() for name, field in one[number].items()} == {
                name: field.tolist() for name, field in in_memory[number].items()
            }
    assert again.notes == first.notes == {"left out by encode_fn": 1, "without a token": 1}
    assert again.lengths.tolist() == [3, 5, 1, 0, 0]


def test_what_is_damaged_is_encoded_again(tmp_path):
    encoded(tmp_path / "kept")
    (tmp_path / "kept/labels.bin").write_bytes(b"")
    assert encoded(tmp_path / "kept")[0]["labels"].tolist() == [1, IGNORED, 3]
    for name in ("labels.offsets.npy", "encoded.json"):
        (tmp_path / "kept" / name).write_bytes(b"")
        assert encoded(tmp_path / "kept")[0]["labels"].tolist() == [1, IGNORED, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_another_function_made_is_not_believed(tmp_path):
    """It may read what no digest of its code knows of."""
    encoded(tmp_path / "kept")

    def other(example):
        found = encode(example)
        return found and {**found, "labels": found["input_ids"]}

    assert encoded(tmp_path / "kept", function=other)[0]["labels"].tolist() == [1, 2, 3]
    assert encoded(tmp_path / "kept", function=other, examples=TEXTS[:2]).lengths.tolist() == [3, 5]


def test_what_is_cut_off_leaves_nothing(tmp_path):
    def failing(example):
        if example is TEXTS[2]:
            raise ExampleError("collate_fn", "no", "yes")
        return encode(example)

    with pytest.raises(DataError, match=r"examples\[2\]: no"):
        encoded(tmp_path / "kept", function=failing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda example: None, "every example is left out: there is nothing to learn"),
        (lambda example: {"input_ids": np.zeros(1, np.int32), str(example["ids"]): np.zeros(1)}, "it has the fields"),
    ],
)
def test_what_cannot_be_kept_is_refused(function, message):
    with pytest.raises((DataError, PluginError), match=message):
        encoded(function=function)


def test_fields_of_other_lengths_and_types():
    """As of a translation: five ids and two labels; and weights, of which an empty text has none."""
    made = encoded(
        examples=[{"ids": []}, {"ids": [1, 2, 3, 4, 5]}, {"ids": [6]}],
        function=lambda example: {
            "input_ids": np.array(example["ids"], np.int32),
            "labels": np.array([IGNORED, 7] if len(example["ids"]) > 1 else [IGNORED], np.int32),
            "weights": np.array([0.5] * len(example["ids"]), np.float32 if example["ids"] else np.int32),
        },
    )
    found = rows(packed=False, found=made)
    assert found.notes()["without a token that carries loss"] == 2
    assert [row["labels"].tolist() for row in found] == [[IGNORED, 7], [IGNORED]]
    assert found[0]["weights"].tolist() == [0.5] * 4
    assert found.longest == 4
    assert found.digest != rows(packed=False).digest == rows(packed=True).digest


def test_rows_with_one_text_each():
    made = rows(packed=False)
    assert [row["input_ids"].tolist() for row in made] == [[1, 2, 3], [4, 5, 6, 7], [9]]
    assert [row["labels"].tolist() for row in made] == [[1, -100, 3], [-100, 5, -100, 7], [9]]
    assert made.notes() == {
        "left out by encode_fn": 1,
        "without a token": 1,
        "longer than data.max_length 4, and cut": 1,
        "without a token that carries loss": 3,
    }
    assert [made.place(row) for row in range(3)] == ["examples[0]", "examples[1]", "examples[2]"]


def test_rows_that_texts_share():
    made = rows("split", packed=True)
    assert [{name: field.tolist() for name, field in row.items()} for row in made] == [
        {
            "input_ids": [4, 5, 6, 7],
            "labels": [-100, 5, -100, 7],
            "segment_ids": [1, 1, 1, 1],
            "position_ids": [0, 1, 2, 3],
        },
        {
            "input_ids": [1, 2, 3, 8],
            "labels": [-100, -100, 3, -100],
            "segment_ids": [1, 1, 1, 2],
            "position_ids": [0, 1, 2, 0],
        },
        {"input_ids": [9], "labels": [-100], "segment_ids": [1], "position_ids": [0]},
    ]
    assert made.place(1) == "examples[0], examples[1]"
    assert made.filled == 9 / 12
    assert made.notes()["longer than data.max_length 4, and split"] == 1


def test_the_labels_of_each_piece_are_counted():
    many = [{"ids": [2, 1 + 2 * (number % 3 == 0)]} for number in range(25_000)]
    found = encoded(
        examples=many,
        function=lambda example: {
            "input_ids": np.array(example["ids"], np.int32),
            "labels": np.array([IGNORED, 3 if example["ids"][1] == 3 else IGNORED], np.int32),
        },
    )
    assert rows(packed=True, found=found).notes() == {"without a token that carries loss": 25_000 - 8_334}
