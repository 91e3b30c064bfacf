"""Where the files of an index may be: beside it, or where the cache of the hub keeps them; nowhere else."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from redco_cli.errors import ModelError
from redco_cli.models.weights.files import open_checkpoint

INDEX = "model.safetensors.index.json"
NAMES = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def model(tmp_path):
    """A directory with two files and their index, and what is in them elsewhere too."""
    directory = tmp_path / "model"
    directory.mkdir()
    for number, name in enumerate(NAMES):
        for place in (directory, tmp_path):
            save_file({f"t{number}": np.full(3, number, np.float32)}, place / name)
    write_index(directory, *NAMES)
    return directory


def write_index(directory, *files):
    weight_map = {f"t{number}": file for number, file in enumerate(files)}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def values(directory):
    checkpoint = open_checkpoint(directory)
    return [checkpoint.read(f"t{number}", (slice(None),)).tolist() for number in range(2)]


BOTH = [[0.0] * 3, [1.0] * 3]


def refusal(directory):
    with pytest.raises(ModelError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    "file",
    ["../model-2.safetensors", "{}/model-2.safetensors", "a/../../model-2.safetensors", "{}/model/model-2.safetensors"],
)
def test_an_index_that_leads_elsewhere_is_refused(model, tmp_path, file):
    file = file.format(tmp_path)
    write_index(model, NAMES[0], file)
    assert refusal(model) == (
        f"{model}/{INDEX}: the tensor t1 is said to be in {file}, which leads out of {model}\n"
        "  -> put the file itself beside the index, and name it there by its name"
    )


@pytest.mark.parametrize(
    "target", ["../model-2.safetensors", "{}/model-2.safetensors", "model-2.safetensors", "/dev/zero"]
)
def test_so_is_a_link_out_and_one_in_a_circle(model, tmp_path, target):
    (model / NAMES[1]).unlink()
    (model / NAMES[1]).symlink_to(target.format(tmp_path))
    assert f"the tensor t1 is said to be in {NAMES[1]}, which leads out of" in refusal(model)


def test_so_is_a_folder_that_is_a_link_out(model, tmp_path):
    (model / "part").symlink_to(tmp_path)
    write_index(model, NAMES[0], "part/model-2.safetensors")
    assert "said to be in part/model-2.safetensors, which leads out" in refusal(model)


@pytest.mark.parametrize("file", ["", "\0", ".", "a\0b", "x" * 5000, "part"])
def test_names_that_no_file_of_weights_can_have(model, file):
    (model / "part").mkdir()
    write_index(model, NAMES[0], file)
    assert refusal(model).startswith(str(model))


def test_an_index_that_is_nested_too_deep_is_damaged(model):
    (model / INDEX).write_text("[" * 100_000)
    assert refusal(model).startswith(f"{model}/{INDEX}: the index is damaged: RecursionError(")


def test_links_and_folders_inside_are_fine(model, tmp_path):
    (model / "part").mkdir()
    (model / NAMES[1]).rename(model / "part" / NAMES[1])
    (model / NAMES[1]).symlink_to(f"part/{NAMES[1]}")
    assert values(model) == BOTH
    write_index(model, NAMES[0], f"part/{NAMES[1]}")
    assert values(model) == BOTH
    (tmp_path / "elsewhere").symlink_to(model)  # the directory itself may be wherever its user wants it
    assert values(tmp_path / "elsewhere") == BOTH


@pytest.mark.parametrize("moved", [False, True], ids=["cache", "blobs_on_another_disk"])
def test_the_cache_of_the_hub(model, tmp_path, moved):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    if moved:
        (tmp_path / "disk").mkdir()
        blobs.symlink_to(tmp_path / "disk")
    else:
        blobs.mkdir()
    for file in (*NAMES, INDEX):
        os.rename(model / file, blobs / f"digest-{file}")
        (snapshot / file).symlink_to(f"../../blobs/digest-{file}")
    assert values(snapshot) == BOTH
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / NAMES[1]).unlink()
    (snapshot / NAMES[1]).symlink_to(f"../../../models--org--other/blobs/{NAMES[1]}")
    assert "which leads out of" in refusal(snapshot)


def test_only_the_cache_may_have_such_links(model, tmp_path):
    """A directory that is only called like one of a snapshot has no blobs of its own."""
    snapshot = tmp_path / "name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    (tmp_path / "name" / "blobs").mkdir()
    (snapshot / NAMES[1]).rename(tmp_path / "name" / "blobs" / "digest")
    (snapshot / NAMES[1]).symlink_to("../../blobs/digest")
    assert "which leads out of" in refusal(snapshot)
