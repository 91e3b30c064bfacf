"""Projects of a user, tiny and on disk: a classifier with its plugin, and a decoder that learns to answer prompts."""

import json
from collections.abc import Callable
from pathlib import Path

CLASSIFIER = """
import numpy as np
import flax.linen as nn
from redco_cli.plugin.contract import Loss

FEATURES, HIDDEN = 5, 16


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="output")(nn.tanh(nn.Dense(HIDDEN, name="hidden")(x)))


def build_model(ctx):
    return Net()


def load_examples(ctx, split):
    generator = np.random.default_rng(0 if split == "train" else 1)
    n = 40 if split == "train" else 21
    x = generator.normal(size=(n, FEATURES)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
    counted = generator.integers(0, 4, size=n)  # how often an example counts: unevenly, some not at all
    return [{"x": x[i], "y": int(y[i]), "counted": int(counted[i]), "id": i} for i in range(n)]


def collate_fn(ctx, examples):
    return {
        "x": np.stack([e["x"] for e in examples]),
        "y": np.array([e["y"] for e in examples]),
        "counted": np.array([e["counted"] for e in examples]),
    }


def loss_fn(ctx, params, batch, rng, train):
    import optax
    logits = ctx.model(params, batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * batch["counted"]
    right = (logits.argmax(-1) == batch["y"]) * batch["counted"]
    return Loss(each.sum(), batch["counted"].sum(), {"accuracy": right.sum()})


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"]).argmax(-1)


def metric_fn(ctx, examples, predictions):
    return {"exact": sum(e["y"] == p for e, p in zip(examples, predictions, strict=True)) / len(examples)}
"""

_CLASSIFIER_RECIPE = """
plugin: {module: plugin.py}
train: {global_batch_size: 8, learning_rate: 1e-2, schedule: cosine, warmup: 10%, max_grad_norm: 1.0, steps: STEPS}
eval: {predict: true, every: EVERY, at_start: AT_START}
checkpoint: {every: EVERY, keep: KEEP}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""

WIDE = ("FEATURES, HIDDEN = 5, 16", "FEATURES, HIDDEN = 128, 256")
"""What to replace in the classifier so that every mesh divides its parameters, and Adafactor factors them."""


def write_classifier(
    directory: Path, *, wide: bool = False, steps: int = 20, every: int = 5, keep: int = 2, at_start: bool = True
) -> None:
    """Writes `plugin.py` and `recipe.yaml`: 40 examples to train on, 21 to evaluate, in batches of 8.

    Args:
        directory: an existing one.
        wide: so that every mesh divides the parameters.
        steps: optimizer steps of the run.
        every: so many of them there is an evaluation and a checkpoint.
        keep: how many of the newest checkpoints stay.
        at_start: whether there is an evaluation before the first step.
    """
    recipe = _CLASSIFIER_RECIPE
    values = {"STEPS": steps, "EVERY": every, "KEEP": keep, "AT_START": str(at_start).lower()}
    for name, value in values.items():
        recipe = recipe.replace(name, str(value))
    (directory / "plugin.py").write_text(CLASSIFIER.replace(*WIDE) if wide else CLASSIFIER)
    (directory / "recipe.yaml").write_text(recipe)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "vocab_size": 264,
    "architectures": ["LlamaForCausalLM"],
}
"""A model that every mesh of eight devices divides, with room for bytes as tokens."""

_ANSWERS_RECIPE = """
model: MODEL
data: DATA
plugin: {module: instruct}
logging: {every: 1, plot: false}
"""


def write_answers(
    directory: Path,
    response: Callable[[int], str],
    sections: str,
    *,
    max_length: int = 24,
    evaluated: bool = True,
    **config: int,
) -> None:
    """Writes `train.jsonl`, 40 prompts with responses, and a `recipe.yaml` that trains a tiny Llama to give them.

    Args:
        directory: an existing one.
        response: to the prompt of a number, which is `a` or `ab` in turns.
        sections: the rest of the recipe.
        max_length: of an example, in tokens, which are bytes.
        evaluated: whether the first 11 examples are data to evaluate on.
        **config: of the model, in place of `LLAMA`'s.
    """
    model = {"config": {**LLAMA, **config}, "task": "causal_lm", "tokenizer": "byte"}
    source = {"path": "json", "data_files": "train.jsonl"}
    data = {"train": source, "max_length": max_length}
    if evaluated:
        data["eval"] = {**source, "split": "train[:11]"}
    recipe = _ANSWERS_RECIPE.replace("MODEL", json.dumps(model)).replace("DATA", json.dumps(data))
    lines = [{"prompt": "ab"[: 1 + i % 2], "response": response(i)} for i in range(40)]
    (directory / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "recipe.yaml").write_text(recipe + sections)
