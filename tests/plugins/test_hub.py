"""Recipes for tasks of the hub, offline: tiny stand-ins of model and data, and PyTorch's loss of the same examples."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from redco_cli.run import predict, train, validate

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BART = {"vocab_size": 260, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
        "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "decoder_start_token_id": 258,
        "is_encoder_decoder": True}  # fmt: skip
GENERATION = {"num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True, "forced_bos_token_id": 257,
              "forced_eos_token_id": 258}  # fmt: skip
"""As `facebook/bart-base` has it."""
WORDS = ("the", "cat", "that", "sat", "on", "a", "mat", "saw", "how", "rain", "fell", "over", "hills", "far", "away")
COLUMNS = {
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "cola": ("sentence",),
    "qnli": ("question", "sentence"),
    "mnli": ("premise", "hypothesis"),
}
CHOSEN = {
    "mrpc": [],
    "stsb": ["model.num_labels=1", "eval.best_metric=spearman"],
    "cola": ["eval.best_metric=matthews"],
    "qnli": ["eval.best_metric=accuracy"],
    "mnli": ["model.num_labels=3", "data.eval.split=validation_matched", "eval.best_metric=accuracy"],
}
"""What the header of `glue` says for each task."""


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, between a begin and an end mark, as a tokenizer of the hub."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<s>", "</s>"]
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 257), ("</s>", 258)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def settings(train: str, held: str) -> list[str]:
    """A short run with these data in the place of a recipe's, and with what was saved to `hub`."""
    data = [
        f"data.{split}={{name: null, split: train, limit: null, {one}}}"
        for split, one in (("train", train), ("eval", held))
    ]
    return ["model.name=hub", "model.dtype=float32", *data, "data.max_length=64", "train.global_batch_size=8",
            "train.steps=2", "train.warmup=0", "eval.every=2", "eval.at_start=true", "logging.plot=false",
            "mesh.data=1", "output_dir=run"]  # fmt: skip


def stand_in(
    model: transformers.PreTrainedModel, columns: tuple[str, ...], label: str, labels: list[object]
) -> list[str]:
    """Writes model, tokenizer and data; returns what puts them into the place of a recipe's."""
    model.eval().save_pretrained("hub")
    tokenizer().save_pretrained("hub")
    draw = np.random.default_rng(0)
    rows = [
        {"idx": number, label: one} | {name: " ".join(draw.choice(WORDS, draw.integers(2, 5))) for name in columns}
        for number, one in enumerate(labels)
    ]
    for split, chosen in (("train", rows[:24]), ("eval", rows[24:])):
        Path(f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chosen))
    return settings(*(f"path: json, data_files: {split}.jsonl" for split in ("train", "eval")))


def glue(task: str) -> list[str]:
    """The stand-in for a task of GLUE: a BERT with a head, so that its loss is known."""
    classes = next((int(one[-1]) for one in CHOSEN[task] if one.startswith("model.num_labels")), 2)
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=64, num_labels=classes, pad_token_id=256)
    labels = [number % 26 / 5 if classes == 1 else number % classes for number in range(35)]
    model = transformers.BertForSequenceClassification(config)
    made = stand_in(model, COLUMNS[task], "label", labels)
    return [f"data.{split}.name={task}" for split in ("train", "eval")] + CHOSEN[task] + made


def cnn_dailymail() -> list[str]:
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
    model.generation_config.update(**GENERATION)
    rows = ["the cat sat", "rain fell over hills", "far away"] * 12
    made = stand_in(model, ("article",), "highlights", rows[:35])
    return [*made, "plugin.options.max_target_length=24", "predict.generation.max_new_tokens=8"]


def vit_gpt2() -> list[str]:
    """Saved as on the hub: masks of attention among the weights, and no class named for images and text together."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    encoder = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    decoder = transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.update({"pad_token_id": 258, "eos_token_id": 258, "decoder_start_token_id": 258})
    model = transformers.VisionEncoderDecoderModel(config).eval()
    model.save_pretrained("hub")
    masks = {f"decoder.transformer.h.{layer}.{kind}.bias": np.tril(np.ones((1, 1, 64, 64), bool))
             for layer in (0, 1) for kind in ("attn", "crossattention")}  # fmt: skip
    save_file({**load_file("hub/model.safetensors"), **masks}, "hub/model.safetensors", {"format": "pt"})
    tokenizer().save_pretrained("hub")
    images = {"feature_extractor_type": "ViTFeatureExtractor", "do_resize": True, "do_normalize": True, "resample": 2,
              "size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    Path("hub/preprocessor_config.json").write_text(json.dumps(images))
    draw = np.random.default_rng(0)
    pixels = [
        draw.integers(0, 256, (20, 30) if number % 5 == 0 else (24, 18, 3)).astype(np.uint8) for number in range(35)
    ]
    rows = {"image": [Image.fromarray(one) for one in pixels],
            "caption": [" ".join(draw.choice(WORDS, draw.integers(2, 5))) for _ in pixels]}  # fmt: skip
    columns = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    made = datasets.Dataset.from_dict(rows, features=columns)
    made.select(range(24)).save_to_disk("of_train")
    made.select(range(24, 35)).save_to_disk("of_eval")
    return [*settings("path: of_train", "path: of_eval"), "model.revision=null"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_task_of_glue_is_valid() -> None:
    summary, _ = validate("glue", glue("mrpc"))
    assert (summary["steps"], summary["examples"]) == (2, {"train": 24, "eval": 11})
    assert set(summary["batch"].split()) >= {"token_type_ids", "labels"}


@pytest.mark.slow
def test_summaries_are_valid() -> None:
    summary, sequences = validate("cnn_dailymail", cnn_dailymail())
    assert summary["steps"] == 2
    shown = "".join(sequences[0].tokens)
    assert shown.endswith("=> <s>the cat sat</s>")


@pytest.mark.slow
def test_captions_are_valid() -> None:
    summary, _ = validate("vit_gpt2", vit_gpt2())
    assert (summary["steps"], summary["examples"]) == (2, {"train": 24, "eval": 11})
    assert summary["batch"] == "labels int32[8, 64], pixel_values float32[8, 3, 16, 16]"


@pytest.mark.slow
@pytest.mark.parametrize("task", COLUMNS)
def test_a_task_of_glue_has_the_loss_of_pytorch(task: str) -> None:
    changes = glue(task)
    evaluations = dict(train("glue", changes).evaluations)
    model = transformers.BertForSequenceClassification.from_pretrained("hub").eval()
    rows = [json.loads(line) for line in Path("eval.jsonl").read_text().splitlines()]
    texts = [[row[name] for row in rows] for name in COLUMNS[task]]
    batch = tokenizer()(*texts, padding="max_length", max_length=64, return_tensors="pt")
    labels = torch.tensor([row["label"] for row in rows])
    with torch.no_grad():
        expected = model(**batch, labels=labels).loss.item()
    assert evaluations[0]["loss"] == pytest.approx(expected, rel=1e-4)
    metric = next((one.partition("=")[2] for one in CHOSEN[task] if "best_metric" in one), "f1")
    assert metric in evaluations[2]


@pytest.mark.slow
def test_summaries_have_the_loss_and_beams_of_pytorch() -> None:
    changes = cnn_dailymail()
    result = train("cnn_dailymail", [*changes, "train.learning_rate=1e-20"])
    model = transformers.BartForConditionalGeneration.from_pretrained("hub").eval()
    rows = [json.loads(line) for line in Path("eval.jsonl").read_text().splitlines()]
    inputs = tokenizer()([row["article"] for row in rows], padding="max_length", max_length=64, return_tensors="pt")
    inputs.pop("token_type_ids")
    labels = tokenizer()([row["highlights"] for row in rows], padding=True, return_tensors="pt")["input_ids"]
    labels[labels == 256] = -100
    with torch.no_grad():
        expected = model(**inputs, labels=labels).loss.item()
        written = model.generate(**inputs, max_new_tokens=8)
    found = dict(result.evaluations)[0]
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    assert {"rouge1", "rouge2", "rougeL", "exact_match"} <= found.keys()
    answers = [json.loads(line)["prediction"] for line in predict("run").read_text().splitlines()]
    assert answers == tokenizer().batch_decode(written, skip_special_tokens=True)


@pytest.mark.slow
def test_captions_have_the_loss_and_beams_of_pytorch() -> None:
    result = train("vit_gpt2", [*vit_gpt2(), "train.learning_rate=1e-20"])
    model = transformers.VisionEncoderDecoderModel.from_pretrained("hub").eval()
    rows = datasets.load_from_disk("of_eval")
    images = transformers.ViTImageProcessor.from_pretrained("hub")
    pixels = images([row["image"].convert("RGB") for row in rows], return_tensors="pt")["pixel_values"]
    labels = tokenizer()(rows["caption"][:], padding=True, return_tensors="pt")["input_ids"]
    labels[labels == 256] = -100
    with torch.no_grad():
        logits = model(pixel_values=pixels, labels=labels).logits  # whose own loss moves the labels a second time
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
        written = model.generate(pixels, max_new_tokens=16, num_beams=4)
    found = dict(result.evaluations)[0]
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    assert {"rouge1", "rouge2", "rougeL", "exact_match"} <= found.keys()
    answers = [json.loads(line)["prediction"] for line in predict("run").read_text().splitlines()]
    assert answers == tokenizer().batch_decode(written, skip_special_tokens=True)
