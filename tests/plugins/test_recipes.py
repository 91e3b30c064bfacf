"""Recipes: the same on every mesh, and whenever they are stopped; those of reinforcement are in a file of their own."""

from pathlib import Path

import pytest

from redco_cli.run import train
from tests.plugins import tiny_pipeline
from tests.training.tiny import assert_same_run, interrupted, recorded

CUBE = "{data: 2, fsdp: 2, tensor: 2}"
STEPS = 20
LOSS_ALONE = ["eval.predict=false", "eval.best_metric=loss", "eval.best_mode=min"]
TINY_PIPELINE = [
    *("model.name=hub", "model.dtype=float32", f"data.max_length={tiny_pipeline.LENGTH}", "train.global_batch_size=8")
]
WHOLE = f"train.steps={STEPS}"
SHORT = {
    "vae": [],
    "contrastive": ["plugin.options.train_examples=3000"],
    "distillation": ["models.teacher.params=teacher"],
    "federated": ["plugin.options={clients: 2, local_steps: 5}", WHOLE],
    "gan": ["plugin.options.train_examples=3000"],
    "meta_learning": ["plugin.options.tasks=3000"],
    "few_shot": ["plugin.options.eval_tasks=16"],
    "text_to_image": ["plugin.options.steps=2"],
    "tagging": ["plugin.options.eval_examples=64"],
    "captioning": ["plugin.options.eval_examples=61"],
    "private": ["privacy.accountant=rdp"],
}
"""Recipe to what makes twenty steps of it short."""
ON_MESHES = {
    **SHORT,
    "digits": [],
    "quickstart": [],
    "instruct": ["plugin.options.eval_examples=16", *LOSS_ALONE],
    "lora": ["model.params=base", "plugin.options.eval_examples=16", *LOSS_ALONE],
    "dates": ["plugin.options.eval_examples=16", *LOSS_ALONE],
    "summaries": ["plugin.options.eval_examples=16", *LOSS_ALONE],
    "text_classification": ["plugin.options.eval_examples=16", *LOSS_ALONE],
    "text_regression": ["plugin.options.eval_examples=16", *LOSS_ALONE],
    "pairs": ["plugin.options.eval_examples=22", *LOSS_ALONE],
    "similarity": ["plugin.options.eval_examples=20", *LOSS_ALONE],
    "stable_diffusion": [*TINY_PIPELINE, "data.train={path: data}", "data.eval=1"],
    "dreambooth": [*TINY_PIPELINE, "plugin.options={images: data_files, class_images: data_files, class_prompt: owl}"],
}
"""The same for meshes, of recipes too whose plugins have nothing of their own to keep; `hub` is a tiny stand-in for a
Stable Diffusion."""
BASES = {"distillation": ("digits", "teacher"), "lora": ("instruct", "base")}
"""Recipe to another that it begins with, and what that is called."""


@pytest.fixture
def short(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`recipe.yaml`, which is a shipped one, in the working directory; and overrides to save time."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(f"extends: {request.param}\noutput_dir: run\n")
    if request.param in BASES:
        base, name = BASES[request.param]
        train(base, [*ON_MESHES[base], "train.steps=20", "mesh.data=1", "logging.plot=false", f"output_dir={name}"])
    if request.param in ("stable_diffusion", "dreambooth"):
        pytest.importorskip("diffusers")
        tiny_pipeline.write_pipeline(Path("hub"))
        tiny_pipeline.write_images(Path("data"))
    evaluated = [] if request.param == "dreambooth" else ["eval.every=10"]  # which has nothing to evaluate on
    return [*ON_MESHES[request.param], *evaluated, "logging.every=1", "logging.plot=false"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("short", ON_MESHES, indirect=True)
def test_the_first_steps_are_those_of_one_device(short: list[str]) -> None:
    """Of the recipe's own schedule, as the run is stopped where they end; but rounds are whole ones."""
    losses = {}
    for number, mesh in enumerate(("{data: 1}", "{data: 8}", CUBE)):
        settings = [*short, f"mesh={mesh}", f"output_dir=run-{number}"]
        train("recipe.yaml", settings) if WHOLE in short else interrupted(STEPS, *settings)
        losses[mesh] = [one["loss"] for one in recorded(f"run-{number}") if one["kind"] == "train"]
    assert len(losses[CUBE]) == STEPS
    for found in losses.values():
        assert found == pytest.approx(losses["{data: 1}"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("short", sorted(SHORT.keys() - {"federated"}), indirect=True)  # whose rounds end before a stop
def test_a_run_that_is_stopped_ends_as_if_it_had_not_been(short: list[str]) -> None:
    whole = [*short, WHOLE, f"train.warmup={STEPS // 2}", "mesh.data=1"]
    train("recipe.yaml", [*whole, "output_dir=whole"])
    interrupted(7, *whole)
    train("recipe.yaml", whole)
    assert_same_run("run", "whole", STEPS)
