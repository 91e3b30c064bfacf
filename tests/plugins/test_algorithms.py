"""The recipes of algorithms, small: each trains, evaluates and predicts in seconds; `acrobot` is as `cartpole`."""

import json

import numpy as np
import pytest

from redco_cli.run import predict, train
from tests.training.tiny import recorded

STEPS = 2
PLAYED = "environments: 2, horizon: 1, random: 8, width: 4, eval_episodes: 2"
SMALL = {
    "vae": "{latents: 2, width: 8}",
    "text_to_image": "{channels: 8, steps: 1, guidance: 1.0}",
    "contrastive": "{channels: 2, width: 4, train_examples: 64, eval_examples: 8}",
    "meta_learning": "{width: 4, tasks: 64, eval_tasks: 4}",
    "few_shot": "{width: 2, inner_steps: 1, tasks: 64, eval_tasks: 4}",
    "distillation": "{channels: 2, student_channels: 2}",
    "gan": "{width: 8, train_examples: 64, eval_examples: 8}",
    "federated": "{channels: 2, clients: 2, local_steps: 1}",
    "private": "{channels: 2, dropout: 0.0, shift: 0}",
    "cartpole": "{environments: 2, horizon: 8, epochs: 1, width: 4, eval_episodes: 2}",
    "pendulum": f"{{{PLAYED}}}",
    "particles": f"{{{PLAYED}, updates: 2, replay: 64}}",
}
"""Recipe to the options that make it small: the number of its examples, and the width of its networks."""
MORE = {
    "distillation": ["models.teacher.params=teacher"],
    "private": ["privacy.accountant=rdp", "train.micro_batch_size=8"],
}
FEW = [
    *(f"train.steps={STEPS}", "train.global_batch_size=8", "train.warmup=0", "eval.every=2", "checkpoint.every=2"),
    *("eval.batch_size=91", "predict.batch_size=91", "logging.every=1", "logging.plot=false", "mesh.data=1"),
]
"""91 is a quarter of the held-out digits, so that all batches are alike."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_a_recipe_trains_evaluates_and_predicts(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if recipe == "distillation":
        train("digits", [*FEW, "plugin.options.channels=2", "output_dir=teacher"])
    settings = [*FEW, f"plugin.options={SMALL[recipe]}", "output_dir=run", *MORE.get(recipe, ())]
    assert train(recipe, settings).step == STEPS
    records = recorded("run")
    assert [one["step"] for one in records if one["kind"] == "train"] == [1, STEPS]
    values = [one for one in records if one["kind"] == "eval"][-1]
    assert values["step"] == STEPS
    assert all(np.isfinite(number) for number in values.values() if isinstance(number, float))
    lines = [json.loads(line) for line in predict("run").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(len(lines)))
    assert lines
