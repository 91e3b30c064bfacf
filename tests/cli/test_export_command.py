"""`redco export` as a user types it: a trained model that transformers loads, bit for bit and token for token."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import redco_cli
from redco_cli import load_model
from redco_cli.cli import app
from redco_cli.exporting.tokenizer import save_byte_tokenizer
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from tests.models.decoder import pairs

PLUGIN = """
import numpy as np
import optax

from redco_cli.plugin.contract import Loss


def load_examples(ctx, split):
    if split == "train":
        return [{"ids": [3 + (i + step) % 9 for step in range(10)]} for i in range(32)]
    return [{"ids": [0] * padding + [3 + (7 * padding + step) % 40 for step in range(10 - padding)]} for padding in
            (0, 3, 6)]


def collate_fn(ctx, examples):
    ids = np.array([example["ids"] for example in examples], np.int32)
    return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int32)}


def loss_fn(ctx, params, batch, rng, train):
    ids = batch["input_ids"]
    logits = ctx.model(params, ids, batch["attention_mask"], rng=rng, train=train)
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
    return Loss(each.sum(), each.size)


def predict_fn(ctx, params, batch, rng):
    tokens = ctx.model.generate(params, batch["input_ids"], batch["attention_mask"], max_new_tokens=8)
    return {"tokens": tokens, "logits": ctx.model(params, **batch)}


def output_fn(ctx, outputs):
    rows = zip(outputs["tokens"].tolist(), outputs["logits"].tolist())
    return [{"tokens": tokens, "logits": logits} for tokens, logits in rows]
"""
RECIPE = """model: {name: saved, implementation: decoder}
plugin: {module: plugin.py}
train: {global_batch_size: 8, steps: 1, learning_rate: 1e-2, schedule: constant}
predict: {batch_size: 4}
logging: {plot: false}
mesh: {data: 1}
output_dir: run
"""
AT_REST = "train.learning_rate=0"
GENERATION = {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256, "max_new_tokens": 7, "temperature": 0.5}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe and its plugin."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("plugin.py").write_text(PLUGIN)
    return tmp_path


def save(family: str, dtype: torch.dtype, **changed: Any) -> Any:
    """A random PyTorch model in `saved`."""
    model = pairs.pair(family, **changed).torch_model.to(dtype)
    model.save_pretrained("saved")
    return model


def done(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str, code: int = 1) -> str:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    return result.stderr


@pytest.fixture
def said_by_transformers() -> Iterator[list[str]]:
    """What it warns of in its log."""
    said: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keeping(logging.WARNING)
    logging.getLogger("transformers").addHandler(handler)
    yield said
    logging.getLogger("transformers").removeHandler(handler)


def loaded(kind: Any, directory: str) -> Any:
    """What transformers loads from a directory, in the type that it is stored in; nothing may be missing or left.

    Its eager attention is the one that squashes the scores of Gemma 2.
    """
    settings = {"output_loading_info": True, "dtype": "auto", "attn_implementation": "eager"}
    model, found = kind.from_pretrained(directory, **settings)
    assert {name: values for name, values in found.items() if values} == {}
    return model.eval()


@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    [
        pytest.param("llama", "decoder", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpt2", "hf_flax", torch.float16, marks=pytest.mark.slow),
        pytest.param("llama", "hf_flax", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpt2", "decoder", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma", "auto", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gptj", "decoder", torch.float16, marks=pytest.mark.slow),
        pytest.param("bloom", "auto", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gemma2", "decoder", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "decoder", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpt_neox", "decoder", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_learning_rate_zero_gives_the_same_bits(
    family: str, implementation: str, dtype: torch.dtype, said_by_transformers: list[str]
) -> None:
    torch_model = save(family, dtype, vocab_size=264)
    save_byte_tokenizer(Path("saved"))
    Path("saved/generation_config.json").write_text(json.dumps(GENERATION | {"do_sample": True}))
    done("train", "recipe.yaml", AT_REST, f"model.implementation={implementation}")
    report = json.loads(done("export", "run", "--output", "out", "--json"))
    again = loaded(transformers.AutoModelForCausalLM, "out")
    assert said_by_transformers == []
    expected, found = torch_model.state_dict(), again.state_dict()
    assert (type(again), found.keys()) == (type(torch_model), expected.keys())
    for name, tensor in expected.items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], tensor), name
    tied = sum(tensor.nbytes for name, tensor in expected.items() if name == "lm_head.weight" and is_tied(torch_model))
    assert report == {
        "directory": str(Path("out").resolve()),
        "files": sorted(path.name for path in Path("out").iterdir()),
        "bytes": sum(tensor.nbytes for tensor in expected.values()) - tied,
        "difference": 0.0,
    }
    kept = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(report["files"]) == kept | {"config.json", "model.safetensors"}
    assert {name: Path("out", name).read_bytes() for name in kept} == {
        name: Path("saved", name).read_bytes() for name in kept
    }
    assert again.generation_config.temperature == 0.5
    talk = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "yes"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer.apply_chat_template(talk) == ByteTokenizer().apply_chat_template(talk)


def is_tied(torch_model: Any) -> bool:
    return bool(torch_model.config.tie_word_embeddings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "{fsdp: 2, tensor: 2}"),
        ("gemma2", "{data: 2, tensor: 2}"),
        ("mixtral", "{fsdp: 4}"),
        ("gpt2", "{fsdp: 4}"),
    ],
)
def test_what_was_trained_is_what_transformers_computes(family: str, mesh: str) -> None:
    """Trained on several devices, and predicted on one: logits to 1e-5, and the same tokens."""
    torch_model = save(family, torch.float32)
    done("train", "recipe.yaml", "train.steps=5", f"mesh={mesh}", "train.optimizer=sgd")
    report = json.loads(done("export", "run", "--output", "out", "--json"))
    assert report["difference"] == 0.0
    again = loaded(type(torch_model), "out")
    before = torch_model.state_dict()
    assert min(float((tensor - before[name]).abs().max()) for name, tensor in again.state_dict().items()) > 1e-4
    done("predict", "run", "mesh={data: 1}")
    lines = [json.loads(line) for line in Path("run/predictions/eval_examples.jsonl").read_text().splitlines()]
    ids = torch.tensor([line["example"]["ids"] for line in lines])
    mask = (ids != 0).long()
    with torch.no_grad():
        logits = again(input_ids=ids, attention_mask=mask).logits
        tokens = again.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)[:, 10:]
    real = mask.bool().numpy()
    found = np.array([line["prediction"]["logits"] for line in lines], np.float32)
    computed = []
    for name in ("out", "run", "run/checkpoint-5"):
        model, params = load_model(name, implementation="auto" if name != "out" else "decoder")
        computed.append(np.asarray(model(params, ids.numpy(), mask.numpy())))
    for one in (found, *computed):
        assert np.abs(one - logits.numpy())[real].max() < 1e-5
    assert [line["prediction"]["tokens"] for line in lines] == tokens.tolist()


@pytest.mark.slow
def test_a_run_that_began_with_other_parameters_needs_no_weights_of_its_model() -> None:
    save("llama", torch.bfloat16)
    done("train", "recipe.yaml")
    Path("saved/model.safetensors").unlink()
    other = ["model.params=run", "output_dir=other"]
    done("train", "recipe.yaml", *other)
    done("export", "other", "--output", "out")
    model = loaded(transformers.AutoModelForCausalLM, "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "float32"
    assert "saved: has no weights" in refused("export", "run", "--output", "lost")  # whose types they have


@pytest.mark.slow
def test_a_model_from_scratch_with_its_tokenizer_from_python() -> None:
    config = "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    scratch = RECIPE.replace("{name: saved, implementation: decoder}", f"{{config: {config}, tokenizer: byte}}")
    Path("recipe.yaml").write_text(scratch)
    done("train", "recipe.yaml")
    exported = redco_cli.export("recipe.yaml", output="out", checkpoint="run/checkpoint-1", dtype="bfloat16")
    assert [file.name for file in exported.files] == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = loaded(transformers.AutoModelForCausalLM, "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert transformers.AutoTokenizer.from_pretrained("out")("hm")["input_ids"] == ByteTokenizer()("hm")["input_ids"]


def test_what_is_wrong_is_refused(folder: Path) -> None:
    save("llama", torch.float32)
    assert refused("export", "recipe.yaml", "--output", "saved") == (
        f"{folder}/saved: the directory is not empty\n  -> choose another directory\n"
    )
    assert refused("export", "recipe.yaml", "--output", "plugin.py/out") == (
        f"{folder}/plugin.py/out: plugin.py/out cannot be made: plugin.py is no directory\n"
        "  -> choose another directory\n"
    )
    assert refused("export", "recipe.yaml", "--output", "out", "--checkpoint", "run/checkpoint-9") == (
        "--checkpoint: run/checkpoint-9 is no checkpoint\n"
        "  -> give last, best, or a directory such as runs/x/checkpoint-100\n"
    )
    assert refused("export", "recipe.yaml", "--output", "out", "--checkpoint", "best") == (
        "run: holds no checkpoint\n  -> train first: redco train\n"
    )
    Path("run").mkdir()
    Path("run/recipe.resolved.yaml").write_text(RECIPE)
    assert refused("export", "run", "--output", "out") == "run: holds no checkpoint\n  -> train first: redco train\n"
    assert refused("export", "saved", "--output", "out", code=2) == (
        "saved: is no run: it has no recipe.resolved.yaml\n  -> name an output directory or a recipe\n"
    )
    assert refused("export", "digits", "--output", "out") == (
        "runs/digits: holds no checkpoint\n  -> train first: redco train\n"
    )
    assert "Missing option '--output'" in refused("export", "run", code=2)
    assert "Invalid value for '--dtype'" in refused("export", "run", "--output", "out", "--dtype", "int8", code=2)
    assert not Path("out").exists()
