"""Stable Diffusion on a tiny pipeline: losses and images beside those that diffusers computes with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from PIL import Image

from redco_cli import export, load_model
from redco_cli.errors import RedcoError
from redco_cli.job import prepare
from redco_cli.models.several import section_of
from redco_cli.models.weights.load import checkpoint_directory, load_params
from redco_cli.plugin.parts import builtin
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict, predict_examples, train, validate
from tests.plugins.tiny_pipeline import LENGTH, SHORT, SIDE, WORDS, write_images, write_pipeline
from tests.training.tiny import recorded

pytest.importorskip("diffusers")
plugin = builtin("stable_diffusion")
STEPS, BATCH = 10, 2
OWN_NUMBERS = """
import numpy as np
from redco_cli.plugin.parts import builtin

given = builtin("stable_diffusion")
Options, prepare_fn, loss_fn, predict_fn = given.Options, given.prepare_fn, given.loss_fn, given.predict_fn


def load_examples(ctx, split):
    if split == "eval":
        return None
    stored = np.load("examples.npz")
    return [{name: stored[name][row] for name in stored} for row in range(len(stored["timestep"]))]


def collate_fn(ctx, examples):
    class_text = {"class_text": "owl"} if "class_image" in examples[0] else {}
    examples = [{**e, "text": "lower low", **class_text} for e in examples]
    batch = dict(given.collate_fn(ctx, examples))
    if ctx.stage == "train":
        batch |= {name: np.stack([e[name] for e in examples]) for name in ("place", "noise", "timestep")}
    return batch
"""
"""The plugin, but what it draws at random is in the examples: of each image, and of the one of its class."""
RECIPE = """
model: {name: hub, subfolder: unet}
models: {vae: {subfolder: vae}, text_encoder: {subfolder: text_encoder}}
plugin: {module: own.py}
data: {shuffle: false, max_length: 12}
train: {global_batch_size: 2, steps: 10, learning_rate: 1e-3, schedule: constant, warmup: 0, weight_decay: 1e-2}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_examples(kinds: int) -> dict[str, np.ndarray]:
    """Images of `STEPS` batches, and of each what is drawn at random; likewise of a class where there are two kinds."""
    draw, count, latents = np.random.default_rng(0), STEPS * BATCH, (8, 8, 4)
    numbers = {
        "place": draw.normal(size=(count, kinds, *latents)).astype(np.float32),
        "noise": draw.normal(size=(count, kinds, *latents)).astype(np.float32),
        "timestep": draw.integers(0, 1000, (count, kinds)).astype(np.int32),
    }
    for name in ("image", "class_image")[:kinds]:
        numbers[name] = draw.uniform(size=(count, SIDE, SIDE, 3)).astype(np.float32)
    np.savez("examples.npz", **numbers)
    return numbers


def given_draws(ctx: Any, batch: Any, shape: Any, rng: Any) -> Any:
    """What is drawn, from the examples, in the order of the plugin's rows: all images, then all of the class."""
    return tuple(
        batch[name].swapaxes(0, 1).reshape(-1, *batch[name].shape[2:]) for name in ("place", "noise", "timestep")
    )


def first(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))


def losses_of_diffusers(
    pipeline: Any, numbers: dict[str, np.ndarray], gamma: float | None, prior: float
) -> list[float]:
    """What a training loop of PyTorch gives: that of diffusers' fine-tuning, with the two images of DreamBooth."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
    unet = pipeline.unet.train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, weight_decay=1e-2, eps=1e-8)
    kinds, found = numbers["place"].shape[1], []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        images = np.concatenate([numbers[name][rows] for name in ("image", "class_image")[:kinds]]) * 2 - 1
        place, noise = (first(np.concatenate([*numbers[name][rows].swapaxes(0, 1)])) for name in ("place", "noise"))
        timestep = torch.from_numpy(np.concatenate([*numbers["timestep"][rows].swapaxes(0, 1)])).long()
        with torch.no_grad():
            spread = pipeline.vae.encode(first(images)).latent_dist
            latents = (spread.mean + spread.std * place) * pipeline.vae.config.scaling_factor
            texts = [*["lower low"] * BATCH, *["owl"] * BATCH * (kinds - 1)]
            ids = pipeline.tokenizer(texts, padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
            states = pipeline.text_encoder(ids)[0]
        noisy = scheduler.add_noise(latents, noise, timestep)
        is_v = scheduler.config.prediction_type == "v_prediction"
        target = scheduler.get_velocity(latents, noise, timestep) if is_v else noise
        error = ((unet(noisy, timestep, states).sample - target) ** 2).mean((1, 2, 3))
        if gamma is not None:
            snr = compute_snr(scheduler, timestep)
            error = error * torch.minimum(snr, torch.full_like(snr, gamma)) / (snr + 1 if is_v else snr)
        own, *of_class = error.split(BATCH)
        loss = own.mean() + prior * sum(one.mean() for one in of_class)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prediction", "gamma", "kinds"),
    [
        ("epsilon", None, 1),
        ("v_prediction", None, 1),
        ("epsilon", 5.0, 1),
        ("v_prediction", 5.0, 1),
        ("epsilon", None, 2),
    ],
)
def test_ten_steps_have_the_losses_of_diffusers(prediction, gamma, kinds, monkeypatch):
    pipeline, numbers = write_pipeline(Path("hub"), prediction), write_examples(kinds)
    monkeypatch.setattr(plugin, "draws", given_draws)
    Path("own.py").write_text(OWN_NUMBERS)
    Path("recipe.yaml").write_text(RECIPE)
    options = f"plugin.options={{min_snr: {'null' if gamma is None else gamma}, prior_weight: 0.7}}"
    train("recipe.yaml", [options])
    found = [row["loss"] for row in recorded("run") if row["kind"] == "train"]
    expected = losses_of_diffusers(pipeline, numbers, gamma, 0.7)
    assert len(expected) == STEPS
    assert abs(expected[-1] - expected[0]) > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("solver", "prediction", "guidance"),
    [
        ("pndm", "epsilon", 7.5),
        ("ddim", "epsilon", 7.5),
        ("dpm_solver++", "v_prediction", 7.5),
        ("ddim", "v_prediction", 1.0),
    ],
)
def test_four_steps_draw_the_images_of_diffusers(solver, prediction, guidance):
    import diffusers

    pipeline = write_pipeline(Path("hub"), prediction)
    Path("recipe.yaml").write_text(RECIPE.replace("own.py", "stable_diffusion"))
    stored = {**json.loads(Path("hub/scheduler/scheduler_config.json").read_text()), "clip_sample": False}
    Path("hub/scheduler/scheduler_config.json").write_text(json.dumps(stored))
    options = [f"plugin.options={{solver: {solver}, steps: 4, guidance: {guidance}, negative: owl}}"]
    prompts = ["low lower", "owl"]
    job = prepare(load_recipe("recipe.yaml", options), stages=("predict",), given=[{"text": one} for one in prompts])
    ctx = job.context("predict")
    params = {
        name: load_params(ctx.models[name], checkpoint_directory(section_of(job.recipe, name), where=job.where)).params
        for name in ("model", "vae", "text_encoder")
    }
    noise = np.random.default_rng(0).normal(size=(2, 8, 8, 4)).astype(np.float32)
    batch = job.collate("predict")(job.eval_examples)
    drawn = jax.jit(lambda params: plugin.draw(ctx, params, batch, noise))(params)
    names = {"pndm": "PNDMScheduler", "ddim": "DDIMScheduler", "dpm_solver++": "DPMSolverMultistepScheduler"}
    pipeline.scheduler = getattr(diffusers, names[solver]).from_config(stored)
    expected = pipeline(
        prompts,
        negative_prompt=["owl"] * 2,
        num_inference_steps=4,
        guidance_scale=guidance,
        latents=torch.from_numpy(noise.transpose(0, 3, 1, 2)),
        output_type="np",
    ).images
    assert expected.std() > 0.05
    np.testing.assert_allclose(drawn, expected, atol=1e-4)


@pytest.mark.slow
def test_the_recipe_is_valid_on_a_tiny_pipeline():
    write_pipeline(Path("hub"))
    write_images(Path("data"))
    summary, _ = validate("stable_diffusion", [*SHORT, "data.train={path: data}", "data.eval=1"])
    assert summary["examples"] == {"train": 3, "eval": 1}
    assert summary["batch"] == ("deviation float32[2, 8, 8, 4], mean float32[2, 8, 8, 4], states float32[2, 12, 16]")


@pytest.mark.slow
def test_dreambooth_is_valid_with_a_folder_of_images_and_one_of_their_class():
    write_pipeline(Path("hub"))
    write_images(Path("photos_of"), 2)
    write_images(Path("class_of"), 3)
    folders = "plugin.options={images: photos_of_files, class_images: class_of_files, class_prompt: owl, steps: 2}"
    summary, _ = validate("dreambooth", [*SHORT, folders, "plugin.options.instance_prompt=low owl"])
    assert summary["examples"]["train"] == 3
    assert "class_states float32[2, 12, 16]" in summary["batch"]
    assert summary["parameters"]["trainable"] < summary["parameters"]["frozen"] / 10


@pytest.mark.slow
def test_a_run_draws_files_and_a_picture_of_them():
    write_pipeline(Path("hub"))
    write_images(Path("data"))
    changes = [*SHORT, "data.train={path: data}", "data.eval=1", "eval.predict=true", "plugin.options.guidance=2"]
    train("stable_diffusion", changes)
    assert Path("run/samples.png").is_file()
    (row,) = [json.loads(line) for line in predict("run").read_text().splitlines()]
    image = np.asarray(Image.open(row["prediction"]["image"]))
    assert image.shape == (SIDE, SIDE, 3)
    assert image.std() > 1
    assert predict_examples("run", [{"text": "low"}])[0]["prediction"]["image"].startswith("run/images/")


def test_images_are_written_by_all_who_draw_them_and_are_one_file_each(context):
    ctx, drawn = context("stable_diffusion"), np.random.default_rng(0).uniform(size=(2, 5, 4, 3))
    first, again = (plugin.output_fn(ctx, drawn) for _ in range(2))
    assert first == again
    assert sorted(map(str, Path("runs/test/images").iterdir())) == sorted(one["image"] for one in first)
    for one, image in zip(first, drawn, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(one["image"])), np.round(image * 255))
    Path(first[0]["image"]).write_bytes(b"of another process")
    plugin.output_fn(ctx, drawn)
    assert Path(first[0]["image"]).read_bytes() == b"of another process"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_goes_to_the_pipeline_of_diffusers_and_comes_back():
    pipeline = write_pipeline(Path("hub"))
    write_images(Path("data"))
    adapter = "adapter={rank: 2, alpha: 6, targets: ['.*/(to_q|to_v|proj_in|up|gate)/kernel']}"
    changes = [*SHORT, "data.train={path: data}", "train.learning_rate=0.1"]
    train("stable_diffusion", [*changes, adapter])
    done = export("run", output="out", adapter=True)
    assert [file.name for file in done.files] == ["pytorch_lora_weights.safetensors"]
    export("run", output="merged")
    pipeline.load_lora_weights("out", weight_name="pytorch_lora_weights.safetensors")
    theirs, again = pipeline.unet.eval(), type(pipeline.unet).from_pretrained("merged").eval()
    given = torch.ones(2, 4, 8, 8), torch.tensor([3, 900]), torch.ones(2, 12, 16)
    with torch.no_grad():
        one, other = theirs(*given).sample, again(*given).sample
        theirs.disable_adapters()
        assert (theirs(*given).sample - one).abs().max() > 0.1
    np.testing.assert_allclose(one, other, atol=1e-4)
    train("stable_diffusion", [*changes, "adapter.from=out", "train.learning_rate=0.0", "output_dir=next"])
    found, expected = load_model("next")[1], load_model("run")[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, expected)


@pytest.mark.slow
def test_prompts_have_the_ids_of_the_pipeline():
    pipeline = write_pipeline(Path("hub"))
    Path("recipe.yaml").write_text(RECIPE.replace("own.py", "stable_diffusion"))
    texts = ["low", "", "low owl " * 9]
    job = prepare(load_recipe("recipe.yaml"), stages=("predict",), given=[{"text": one} for one in texts])
    found = job.collate("predict")(job.eval_examples)["input_ids"]
    wanted = pipeline.tokenizer(texts, padding="max_length", max_length=LENGTH, truncation=True).input_ids
    assert found.tolist() == wanted
    assert found[0].tolist()[:3] == [WORDS.index(one) for one in ("<|startoftext|>", "low</w>", "<|endoftext|>")]


def test_an_image_keeps_its_middle():
    """As torchvision's CenterCrop, ToTensor and Normalize make of it where its shorter side is as long as is wanted."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, 24, 3)).astype(np.uint8))
    expected = np.asarray(image, np.float32)[:, 4:20] / 255 * 2 - 1
    np.testing.assert_allclose(plugin.pixels(image, SIDE), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("{unprompted: 2}", "unprompted must be 0 to 1, prior_weight 0 or more, and min_snr above 0"),
        ("{class_images: here}", "class_images need a class_prompt, and images beside which they stand"),
        ("{images: nowhere, instance_prompt: low}", "there are no images in nowhere"),
        ("{images: images_files, solver: ddim, instance_prompt: owl}", "clip_sample True: only False is computed here"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, problem):
    write_pipeline(Path("hub"))
    write_images(Path("images"), 2)
    Path("recipe.yaml").write_text(RECIPE.replace("own.py", "stable_diffusion"))
    with pytest.raises(RedcoError) as refused:
        validate("recipe.yaml", [f"plugin.options={options}"])
    assert problem in str(refused.value)
