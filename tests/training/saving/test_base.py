"""The model that an adapter is trained for, kept once where nothing else has it: `output_dir/base/`."""

import errno
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from redco_cli import load_model
from redco_cli.errors import ModelError, StorageError
from redco_cli.run import predict_examples, train
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.files.deletion import UNFINISHED
from tests.training.tiny import final_state, interrupted

PARAMS = {"model": {"kernel": np.arange(4096, dtype=np.float32).reshape(64, 64)}, "adapter": {"x": np.zeros(3)}}
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"kernel": jax.ShapeDtypeStruct((64, 64), np.float32, sharding=DEVICE)}
ADAPTER = ["adapter={rank: 2, alpha: 8, targets: ['hidden/kernel']}", "eval={every: 4}", "mesh.data=1"]
EXAMPLE = {"x": np.linspace(-1, 1, 8).astype(np.float32), "y": 0, "id": 0}
CUBE = "mesh={data: 2, fsdp: 2, tensor: 2}"


def keep(run: Path, digest: str | None = "one", params=PARAMS) -> None:
    checkpoints = Checkpoints(run, 1, "min", {"model"})
    checkpoints.sweep()
    checkpoints.keep_base(jax.device_put(params, DEVICE), digest)
    checkpoints.close()


def read(run: Path) -> np.ndarray:
    return np.asarray(Checkpoints(run, 1, "min", {"model"}).restore_base(ABSTRACT)["kernel"])


def test_it_is_written_once_and_whole_or_not_at_all(tmp_path, monkeypatch):
    keep(tmp_path, None)
    assert not (tmp_path / "base").exists()
    (tmp_path / f"base{UNFINISHED}" / "params").mkdir(parents=True)  # as a killed run leaves it
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr("redco_cli.training.saving.checkpoint.write_manifest", lambda _: (_ for _ in ()).throw(full))
        with pytest.raises(StorageError, match=r"base: cannot be written: No space left on device; complete before it"):
            keep(tmp_path)
    assert list(tmp_path.iterdir()) == []
    keep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    written = (tmp_path / "base/manifest.json").stat().st_mtime_ns
    keep(tmp_path)
    assert (tmp_path / "base/manifest.json").stat().st_mtime_ns == written
    np.testing.assert_array_equal(read(tmp_path), PARAMS["model"]["kernel"])
    keep(tmp_path, "another", {**PARAMS, "model": {"kernel": -PARAMS["model"]["kernel"]}})
    assert {path.name for path in tmp_path.iterdir()} == {"base", "base.replaced"}
    np.testing.assert_array_equal(read(tmp_path), -PARAMS["model"]["kernel"])


def test_one_that_is_damaged_or_gone_is_refused(tmp_path):
    keep(tmp_path / "run")
    (tmp_path / "run/steps-3").mkdir()
    np.testing.assert_array_equal(read(tmp_path / "run/steps-3"), PARAMS["model"]["kernel"])
    file = max(
        (path for path in (tmp_path / "run/base").rglob("*") if path.is_file()), key=lambda one: one.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"run/base: holds the model that .* cannot be used: .* holds other bytes"):
        read(tmp_path / "run")
    keep(tmp_path / "run")  # a run that begins anew does not take it for whole
    np.testing.assert_array_equal(read(tmp_path / "run"), PARAMS["model"]["kernel"])
    shutil.rmtree(tmp_path / "run/base")
    with pytest.raises(StorageError, match=r"base: .* cannot be used: it is gone\n.* restore it from a copy"):
        read(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_project")
def test_random_numbers_are_kept_wherever_the_run_is():
    train("recipe.yaml", [*ADAPTER, "train.steps=2"])
    assert not [name for name in final_state("run", 2) if "['params']['model']" in name]
    expected = load_model("run")[1]
    os.mkdir("elsewhere")
    Path("run").rename("elsewhere/moved")
    jax.tree.map(np.testing.assert_array_equal, load_model("elsewhere/moved/checkpoint-2")[1], expected)
    Path("elsewhere/moved/base").rename("base")
    with pytest.raises(StorageError, match=r"moved/base: .* it is gone"):
        load_model("elsewhere/moved")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_project")
def test_a_run_with_random_numbers_continues_on_another_mesh():
    train("recipe.yaml", [*ADAPTER, "output_dir=whole"])
    expected = predict_examples("whole", [EXAMPLE])
    shutil.copytree("whole", "other")
    shutil.rmtree("other/base")
    params = jax.tree.map(lambda leaf: leaf + 1, load_model("whole")[1])
    keep(Path("other").resolve(), "x", {"model": params})
    with pytest.raises(ModelError, match=r"its parameters are not those that other/checkpoint-12 was trained with"):
        load_model("other")
    interrupted(5, *ADAPTER)
    written = Path("run/base/manifest.json").stat().st_mtime_ns
    train("recipe.yaml", [*ADAPTER, CUBE])
    assert Path("run/base/manifest.json").stat().st_mtime_ns == written
    for name, value in final_state("whole", 12).items():
        np.testing.assert_allclose(final_state("run", 12)[name], value, rtol=1e-4, atol=1e-6)
    assert predict_examples("run", [EXAMPLE]) == expected
