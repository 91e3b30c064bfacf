"""About how many examples a source has, without reading it."""

import gzip
from types import SimpleNamespace

import pytest

from redco_cli.data.mixed.lengths import expected_length
from redco_cli.data.source import load_source
from redco_cli.recipe.data import SourceSection


def load(folder, **source):
    section = SourceSection(**source)
    return load_source(section, "data.train", streaming=True, directory=folder, where=str)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets leaves a csv open
@pytest.mark.parametrize("form", ["json", "csv", "text", "parquet", "arrow", "saved"])
def test_files_tell_about_how_many_there_are(tmp_path, form):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"line {number}" for number in range(300)]})
    if form == "saved":
        rows.select(range(250)).save_to_disk(tmp_path / "rows")
        found = load(tmp_path, path="rows")
        assert found.expected() == 250
        return
    for part in range(2):
        path, shard = tmp_path / f"{part}.{form}", rows.shard(2, part, contiguous=True)
        if form == "arrow":
            shard.save_to_disk(tmp_path / "saved")
            path.write_bytes((tmp_path / "saved/data-00000-of-00001.arrow").read_bytes())
        elif form == "text":
            path.write_text("".join(f"{text}\n" for text in shard["text"]))
        else:
            getattr(shard, f"to_{form}")(path)
    found = load(tmp_path, path=form, data_files=f"*.{form}")
    assert found.expected() == 300 + (2 if form == "csv" else 0)
    assert load(tmp_path, path=form, data_files=f"*.{form}", limit=40).expected() == 40


def test_a_long_file_is_estimated_by_its_beginning(tmp_path):
    (tmp_path / "a.json").write_text('{"x": 1}\n' * 300_000)
    assert expected_length(unknown(), "train", "json", [str(tmp_path / "a.json")]) == pytest.approx(300_000, rel=1e-4)


def unknown(**splits):
    return SimpleNamespace(info=SimpleNamespace(splits=splits or None))


def test_what_nobody_knows(tmp_path):
    (tmp_path / "a.json").write_text('[{"x": 1}, {"x": 2}]\n')
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'{"x": 1}\n'))
    (tmp_path / "c.json").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "d.parquet").write_text("no parquet")
    for name in ("a.json", "b.json.gz", "d.parquet"):
        form = "parquet" if name == "d.parquet" else "json"
        assert expected_length(unknown(), "train", form, [str(tmp_path / name)]) is None
    assert expected_length(unknown(), "train", "json", [str(tmp_path / "c.json"), "https://host/d.json"]) is None
    assert expected_length(unknown(), "train", "org/data", []) is None
    assert load(tmp_path, path="json", data_files="a.json", limit=1).expected() == 1


def test_a_hub_says_it():
    told = unknown(train=SimpleNamespace(num_examples=12_345), test=SimpleNamespace(num_examples=None))
    assert expected_length(told, "train", "org/data", []) == 12_345
    assert expected_length(told, "test", "org/data", []) is None
