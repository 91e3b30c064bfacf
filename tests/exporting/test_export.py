"""From a checkpoint to a model and back: transformers loads what is exported, and finds the same bits."""

import json
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from redco_cli.errors import ModelError, StorageError
from redco_cli.exporting import check as export_check
from redco_cli.exporting import export
from redco_cli.exporting import files as export_files
from redco_cli.exporting.export import export_model
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.models.config.tasks import flax_class_names
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection
from tests.models.decoder import pairs
from tests.models.flax import tiny

TYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_FLAX = ("bert", "t5", "vit", "bart")


@pytest.fixture
def unchecked(monkeypatch):
    """Logits are not compared: other tests do that, and here each would compile two programs."""
    monkeypatch.setattr(export, "difference_of", lambda *_: 0.0)


def a_decoder(family, directory, dtype=torch.float32, **changed):
    """A random PyTorch model in `directory`, the model for it, and its parameters."""
    models = pairs.pair(family, **changed)
    models.torch_model.to(dtype).save_pretrained(directory)
    model = resolve_model(ModelSection(name=str(directory), implementation="decoder"), where=pairs.where)
    return models.torch_model, model, load_params(model, directory).params


def a_flax_model(model_type, directory, dtype=torch.float32):
    task = next(iter(flax_class_names(model_type)))
    saved = tiny.save_torch(tiny.config_for(model_type, task), task, directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # generation settings in the config of a composite
        saved.torch_model.to(dtype).save_pretrained(directory)
    section = saved.section.model_copy(update={"implementation": "hf_flax"})
    model = resolve_model(section, where=tiny.where)
    return saved.torch_model, model, load_params(model, directory).params


def assert_same(torch_model, directory):
    """transformers finds every tensor, none besides, and the same bits in each, in the type that the model has."""
    again, found = type(torch_model).from_pretrained(directory, output_loading_info=True, dtype="auto")
    assert {kind: names for kind, names in found.items() if names} == {}
    expected, loaded = torch_model.state_dict(), again.state_dict()
    assert loaded.keys() == expected.keys()
    stored = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_torch(file).items()}
    for name, tensor in expected.items():
        if not name.endswith("num_batches_tracked"):
            assert stored.get(name, tensor).dtype == tensor.dtype, name
            assert torch.equal(loaded[name].to(tensor.dtype), tensor), name  # T5 widens some when it loads


@pytest.mark.parametrize(("family", "dtype"), pairs.families_and(TYPES))
@pytest.mark.usefixtures("unchecked")
def test_decoders_come_back_bit_for_bit(family, dtype, tmp_path):
    torch_model, model, params = a_decoder(family, tmp_path / "in", dtype)
    exported = export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    assert [file.name for file in exported.files] == ["config.json", "generation_config.json", "model.safetensors"]
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "in/model.safetensors").keys()
    assert_same(torch_model, tmp_path / "out")


@pytest.mark.parametrize(
    "changed",
    [
        {"decoder_sparse_step": 2},
        pytest.param({"mlp_only_layers": [1], "num_hidden_layers": 4}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_stacks_of_layers_with_and_without_experts_come_back_bit_for_bit(changed, tmp_path):
    torch_model, model, params = a_decoder("qwen2_moe", tmp_path / "in", torch.bfloat16, **changed)
    assert {"layers_0", "layers_1"} <= params.keys()
    export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    assert_same(torch_model, tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        pytest.param(name, TYPES[number % 3], marks=() if name in QUICK_FLAX else pytest.mark.slow)
        for number, name in enumerate(tiny.CONFIGS)
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_flax_models_come_back_bit_for_bit(model_type, dtype, tmp_path):
    torch_model, model, params = a_flax_model(model_type, tmp_path / "in", dtype)
    export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    stored, written = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("in", "out"))
    assert {name for name in stored ^ written if not name.endswith("num_batches_tracked")} == set()
    assert_same(torch_model, tmp_path / "out")


@pytest.mark.parametrize("kind", ["gpt_neox", "bert"])
def test_what_is_written_is_loaded_and_gives_the_same_logits(kind, tmp_path):
    make = a_decoder if kind == "gpt_neox" else a_flax_model
    torch_model, model, params = make(kind, tmp_path / "in")
    (tmp_path / "out").mkdir()  # an empty directory is as good as none
    exported = export_model(model, params, tmp_path / "out")
    assert exported.difference == 0.0
    assert_same(torch_model, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert exported.nbytes == sum(array.nbytes for array in load_file(tmp_path / "out/model.safetensors").values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trained_parameters_are_rounded_once(tmp_path, dtype):
    """From shards, to nearest; float16 with values below its normal ones too."""
    _, model, params = a_decoder("llama", tmp_path / "in", hidden_size=32, num_attention_heads=8)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def split(leaf):
        axes = (None,) * (leaf.ndim - 2) + ("fsdp", "tensor") if leaf.ndim > 1 else ()
        return jax.device_put(leaf * 1e-4 + jnp.pi * 1e-3 * leaf**2, NamedSharding(mesh, PartitionSpec(*axes)))

    params = jax.tree.map(split, params)
    exported = export_model(model, params, tmp_path / "out", source=tmp_path / "in", dtype=dtype)
    assert exported.difference <= export_check.TOLERANCE
    again = load_params(model, tmp_path / "out").params
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype


@pytest.mark.usefixtures("unchecked")
def test_ropes_as_transformers_5_writes_them_are_exported_for_4_too(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    torch_model, _, _ = a_decoder("qwen2", tmp_path / "in", rope_theta=500.0, rope_scaling=rope)
    config = json.loads((tmp_path / "in/config.json").read_text())
    theirs = {key: config.pop(key) for key in ("rope_theta", "rope_scaling")}
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    model = resolve_model(ModelSection(name=str(tmp_path / "in")), where=pairs.where)
    export_model(model, load_params(model, tmp_path / "in").params, tmp_path / "out", source=tmp_path / "in")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "rope_parameters" not in written
    assert written["rope_theta"] == 500.0
    assert written["rope_scaling"] | {"rope_theta": 500.0} == theirs["rope_scaling"]
    assert_same(torch_model, tmp_path / "out")


@pytest.mark.usefixtures("unchecked")
def test_many_files_have_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(export_files, "SHARD_BYTES", 10_000)
    torch_model, model, params = a_decoder("phi3", tmp_path / "in")
    (tmp_path / "in/model.safetensors").unlink()
    torch_model.save_pretrained(tmp_path / "in", max_shard_size="8KB")
    exported = export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    names = [file.name for file in exported.files if file.suffix == ".safetensors"]
    assert len(names) > 2
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": exported.nbytes}
    for name in names:
        tensors = load_file(tmp_path / "out" / name)
        assert sum(array.nbytes for array in tensors.values()) <= 10_000
        assert {index["weight_map"][tensor] for tensor in tensors} == {name}
    assert_same(torch_model, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, load_params(model, tmp_path / "out").params, params)


@pytest.mark.usefixtures("unchecked")
def test_a_new_head_takes_the_type_of_the_rest(tmp_path):
    torch_model, _, _ = a_flax_model("bert", tmp_path / "in", torch.bfloat16)
    section = ModelSection(name=str(tmp_path / "in"), task="sequence_classification", num_labels=3)
    model = resolve_model(section, where=tiny.where)
    params = load_params(model, tmp_path / "in", rng=jax.random.key(0)).params
    export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    again, found = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert {kind: names for kind, names in found.items() if names} == {}
    assert (type(again).__name__, again.classifier.weight.dtype) == ("BertForSequenceClassification", torch.bfloat16)
    expected = np.asarray(params["classifier"]["kernel"]).T.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(again.classifier.weight.float().detach().numpy(), expected)
    words = torch_model.bert.embeddings.word_embeddings.weight
    assert torch.equal(again.bert.embeddings.word_embeddings.weight, words)


@pytest.mark.usefixtures("unchecked")
def test_tokenizer_and_generation_config_are_copied(tmp_path):
    _, model, params = a_decoder("llama", tmp_path / "in")
    texts = {
        "generation_config.json": '{"max_new_tokens": 7}',
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "special_tokens_map.json": "{}",
        "tokenizer.model": "spm",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    (tmp_path / "in/additional_chat_templates").mkdir()
    for name, text in (texts | {"README.md": "no", "pytorch_model.bin": "no"}).items():
        (tmp_path / "in" / name).write_text(text)
    exported = export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    names = {str(file.relative_to(tmp_path / "out")) for file in exported.files}
    assert names == {"config.json", "model.safetensors", *texts}
    assert {name: (tmp_path / "out" / name).read_text() for name in texts} == texts


@pytest.mark.usefixtures("unchecked")
def test_the_byte_tokenizer_becomes_one_of_transformers(tmp_path):
    _, model, params = a_decoder("llama", tmp_path / "in")
    export_model(model, params, tmp_path / "out", tokenizer=ByteTokenizer())
    ours, theirs = ByteTokenizer(), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "".join(map(chr, range(1, 600))) + " naïve  tabs\t\n\n¡日本語! 🙂"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert len(theirs) == len(ours)
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
    assert [getattr(theirs, name) for name in names] == [getattr(ours, name) for name in names]
    talk = [{"role": "user", "content": "two\nlines"}, {"role": "assistant", "content": "yes"}]
    for asked in (False, True):
        ids = theirs.apply_chat_template(talk, add_generation_prompt=asked)
        assert ids == ours.apply_chat_template(talk, add_generation_prompt=asked)


def test_a_directory_with_files_is_left_alone(tmp_path):
    _, model, params = a_decoder("llama", tmp_path / "in")
    with pytest.raises(StorageError) as caught:
        export_model(model, params, tmp_path / "in")
    text = f"{tmp_path / 'in'}: the directory is not empty\n  -> choose another directory"
    assert str(caught.value) == text


@pytest.mark.usefixtures("unchecked")
def test_a_full_disk_is_told(tmp_path, monkeypatch):
    _, model, params = a_decoder("llama", tmp_path / "in")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    with pytest.raises(StorageError) as caught:
        export_model(model, params, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: 0.0 GB are needed, and 0.0 GB are free\n  -> free some space, or choose another directory"
    )
    monkeypatch.undo()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_files, "_write_file", fail)
    with pytest.raises(StorageError) as caught:
        export_model(model, params, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: cannot be written: No space left on device\n  -> choose another directory"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_export_that_is_another_model_is_not_kept(tmp_path, monkeypatch):
    _, model, params = a_decoder("llama", tmp_path / "in")
    write = export.write_weights

    def spoil(tensors, directory, *others):
        failure = write(tensors, directory, *others)
        file = directory / "model.safetensors"
        stored = load_file(file)
        save_file({name: tensor * 1.001 for name, tensor in stored.items()}, file, metadata={"format": "pt"})
        return failure

    monkeypatch.setattr(export, "write_weights", spoil)
    with pytest.raises(ModelError, match="gives other logits than the model: they differ by ") as caught:
        export_model(model, params, tmp_path / "out")
    assert str(caught.value).endswith("\n  -> report this model: its export is wrong")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.usefixtures("unchecked")
def test_parameters_that_cannot_be_written_are_named(tmp_path):
    _, model, params = a_decoder("llama", tmp_path / "in")
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * 1e6
    with pytest.raises(ModelError) as caught:
        export_model(model, params, tmp_path / "out", dtype="float16")
    assert str(caught.value) == (
        "model.norm.weight: holds values that are not finite in float16\n  -> export in float32, or from another "
        "checkpoint"
    )
    params["adapter"] = {"a": jnp.zeros(3)}
    del params["head"]
    with pytest.raises(ModelError) as caught:
        export_model(model, params, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: 2 parameters are not those of the model: adapter/a, head\n"
        "  -> export the parameters of this model, with adapters merged into them"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


ALONE = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from redco_cli.exporting.export import export_model
from redco_cli import load_model
for name in sys.argv[1:]:
    model, params = load_model(f"{name}/in", implementation="auto" if name.endswith("vit") else "decoder")
    print(export_model(model, params, Path(f"{name}/out"), source=Path(f"{name}/in")).difference)
"""


@pytest.mark.slow
def test_torch_is_never_needed(tmp_path):
    torch_models = {
        "llama": a_decoder("llama", tmp_path / "llama/in", torch.bfloat16)[0],
        "vit": a_flax_model("vit", tmp_path / "vit/in")[0],
    }
    names = [str(tmp_path / name) for name in torch_models]
    done = subprocess.run([sys.executable, "-c", ALONE, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == [0.0, 0.0]
    for name, torch_model in torch_models.items():
        assert_same(torch_model, tmp_path / name / "out")


TOGETHER = """
import os, sys
from pathlib import Path
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import AxisType
from redco_cli.errors import StorageError
from redco_cli.exporting.export import export_model
from redco_cli import load_model
mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
directory = Path(sys.argv[3])
model, params = load_model(str(directory / "in"), mesh=mesh, implementation="decoder")
assert not params["layers"]["mlp"]["up"]["kernel"].is_fully_addressable
print(export_model(model, params, directory / "out", source=directory / "in").difference)
try:
    export_model(model, params, directory / "out")
except StorageError as error:
    print(error.problems[0].problem)
"""


@pytest.mark.slow
def test_two_processes_write_one_model(tmp_path):
    import socket

    torch_model, _, _ = a_decoder("llama", tmp_path / "in", torch.bfloat16, hidden_size=48)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", TOGETHER, address]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    results = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0].splitlines()[-2:] == ["0.0", "the directory is not empty"]
    assert results[1][0].splitlines()[-2:] == ["0.0", "cannot be written by process 0"]
    assert_same(torch_model, tmp_path / "out")


def test_params_are_not_touched(tmp_path):
    _, model, params = a_decoder("gpt2", tmp_path / "in")
    before = {path: np.array(leaf) for path, leaf in flatten_dict(params).items()}
    export_model(model, params, tmp_path / "out")
    for path, leaf in flatten_dict(params).items():
        np.testing.assert_array_equal(leaf, before[path])
