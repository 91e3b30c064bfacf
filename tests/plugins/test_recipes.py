"""Recipes with algorithms of their own: the same on every mesh, and whenever they are stopped."""

from pathlib import Path

import pytest

from redco_cli.run import train
from tests.training.tiny import assert_same_run, interrupted, recorded

CUBE = "{data: 2, fsdp: 2, tensor: 2}"
STEPS = 20
SHORT = {
    "vae": [],
    "contrastive": ["plugin.options.train_examples=3000", "train.warmup=20", "train.learning_rate=1.5e-3"],
    "distillation": ["models.teacher.params=teacher"],
    "federated": ["plugin.options={clients: 2, local_steps: 5}"],
    "gan": ["plugin.options.train_examples=3000"],
    "meta_learning": ["plugin.options.tasks=3000"],
    "few_shot": ["plugin.options.eval_tasks=16", "train.warmup=20", "train.learning_rate=2e-4"],
    "text_to_image": ["plugin.options.steps=2"],
    "tagging": ["plugin.options.eval_examples=64"],
    "captioning": ["plugin.options.eval_examples=61", "train.warmup=20"],
    "private": ["privacy.accountant=rdp"],
}
"""Recipe to what makes twenty steps of it short."""
FEW = [f"train.steps={STEPS}", "logging.every=1", "logging.plot=false"]


@pytest.fixture
def short(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`recipe.yaml`, which is a shipped one, in the working directory; and the overrides of a short run."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(f"extends: {request.param}\noutput_dir: run\n")
    if request.param == "distillation":
        train("digits", ["train.steps=2", "mesh.data=1", "logging.plot=false", "output_dir=teacher"])
    return [*FEW, *SHORT[request.param]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("short", SHORT, indirect=True)
def test_the_first_steps_are_those_of_one_device(short: list[str]) -> None:
    losses = {}
    for number, mesh in enumerate(("{data: 1}", "{data: 8}", CUBE)):
        train("recipe.yaml", [*short, f"mesh={mesh}", f"output_dir=run-{number}"])
        losses[mesh] = [one["loss"] for one in recorded(f"run-{number}") if one["kind"] == "train"]
    assert len(losses[CUBE]) == STEPS
    for found in losses.values():
        assert found == pytest.approx(losses["{data: 1}"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("short", sorted(SHORT.keys() - {"federated"}), indirect=True)  # whose rounds end before a stop
def test_a_run_that_is_stopped_ends_as_if_it_had_not_been(short: list[str]) -> None:
    whole = [*short, "mesh.data=1"]
    train("recipe.yaml", [*whole, "output_dir=whole"])
    interrupted(7, *whole)
    train("recipe.yaml", whole)
    assert_same_run("run", "whole", STEPS)
