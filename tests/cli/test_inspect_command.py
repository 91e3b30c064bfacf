"""`redco inspect-sharding` as a user types it: what it takes, what it prints, what it refuses."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.models.families.registry import descriptions
from redco_cli.models.presets import preset_names
from redco_cli.planning.report import report_schema
from tests.projects import LLAMA

YAML = (
    "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 8,\n"
    " num_key_value_heads: 8, max_position_embeddings: 64, vocab_size: 264, architectures: [LlamaForCausalLM]}"
)
SMALL = ["--devices", "8", "--batch-size", "16", "--seq-length", "32"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model `tiny` that has no weights."""
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def done(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect-sharding", *arguments])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def refused(code: int, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect-sharding", *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done(*arguments, "--json"))
    return found


def check(value: Any, schema: Any, whole: Any, place: str = "report") -> None:
    """The part of JSON Schema that `report_schema` uses."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        kinds = [one.get("type", "object") for one in schema["anyOf"]]
        assert value is not None or "null" in kinds, place
        if value is not None:
            (schema,) = [one for one in schema["anyOf"] if one.get("type") != "null"]
            check(value, schema, whole, place)
        return
    kind = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    assert isinstance(value, kind[schema["type"]]), (place, value, schema)
    if schema["type"] == "array" and "items" in schema:
        for index, one in enumerate(value):
            check(one, schema["items"], whole, f"{place}[{index}]")
    if "properties" in schema:
        assert set(schema["required"]) <= set(value) <= set(schema["properties"]), place
        for name, one in value.items():
            check(one, schema["properties"][name], whole, f"{place}.{name}")
    elif schema["type"] == "object":
        for name, one in value.items():
            check(one, schema["additionalProperties"], whole, f"{place}.{name}")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("tiny", "tiny"),
        ("tiny/", "tiny/"),
        ("tiny/config.json", "tiny/config.json"),
        (json.dumps(LLAMA), "llama"),
        (YAML, "llama"),
    ],
    ids=["directory", "slash", "file", "json", "yaml"],
)
def test_a_model_by_directory_file_or_config(target: str, name: str) -> None:
    found = document(target, *SMALL)
    assert (found["model"], found["parameters"], found["bytes"]) == (name, 116_032, 464_128)
    assert (found["devices"], found["global_batch_size"], found["seq_length"]) == (8, 16, 32)
    assert found["chosen"]["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1}


def test_a_preset_in_every_spelling() -> None:
    of_preset = document("opt-125m", "--mesh", "tensor=4,fsdp=2", "--seq-length", "64", "--batch-size", "8")
    by_hub = document("facebook/OPT-125m", "--mesh", "fsdp=2,tensor=4", "--seq-length", "64", "--batch-size", "8")
    assert of_preset == by_hub
    assert (of_preset["model"], of_preset["parameters"]) == ("opt-125m", 125_239_296)
    assert of_preset["chosen"]["mesh"] == {"data": 1, "fsdp": 2, "tensor": 4}


def test_a_recipe_by_name_and_by_file_and_its_run(folder: Path) -> None:
    from redco_cli.recipe.load import load_recipe, resolved_yaml
    from redco_cli.recipe.paths import pin_paths

    Path("mine.yaml").write_text("extends: quickstart\ntrain: {global_batch_size: 16}\noutput_dir: run\n")
    mine = document("mine.yaml", "--mesh", "fsdp=4,tensor=2")
    shipped = document("quickstart", "--mesh", "fsdp=4,tensor=2", "--batch-size", "16")
    assert mine["model"] == "mine"
    assert {**shipped, "model": "mine"} == mine
    Path("run").mkdir()
    Path("run/recipe.resolved.yaml").write_text(resolved_yaml(pin_paths(load_recipe("mine.yaml"))))
    assert {**document("run", "--mesh", "fsdp=4,tensor=2"), "model": "mine"} == mine


@pytest.mark.slow
def test_json_is_what_the_schema_says() -> None:
    schema = report_schema()
    fits = document("tiny", *SMALL, "--device-memory", "1GiB")
    too_large = document("tiny", *SMALL, "--device-memory", "100KiB", "--mesh", "fsdp=4,tensor=2")
    unknown = document("tiny", *SMALL, "--mesh", "fsdp=8")
    assert [one["fits"] for one in (fits, too_large, unknown)] == [True, False, None]
    for one in (fits, too_large, unknown):
        check(one, schema, schema)
    with pytest.raises(AssertionError):
        check({**unknown, "devices": "8"}, schema, schema)


@pytest.mark.slow
def test_text_says_whether_it_fits() -> None:
    lines = done("tiny", *SMALL, "--mesh", "fsdp=4,tensor=2", "--device-memory", "16MiB").splitlines()
    assert lines[0] == "tiny: 116,032 parameters, 453 KiB, on 8 devices"
    assert lines[1].startswith("mesh: data=1,fsdp=4,tensor=2 (as given; in a step a device moves 0 B between hosts, ")
    assert lines[2] == "step: 16 examples of 32 tokens, micro-batch 16, remat none, computed in bfloat16"
    assert re.fullmatch(r"fits: [\d.]+ (K|M)iB of 16 MiB per device", lines[-1])
    text = done("tiny", *SMALL, "--mesh", "fsdp=4,tensor=2", "--device-memory", "1KiB")
    assert re.search(r"^does not fit: [\d.]+ KiB of 1 KiB per device\n  -> ", text, re.MULTILINE)


def test_a_picture_is_written_or_refused() -> None:
    done("tiny", *SMALL, "--svg", "plan.svg")
    assert ElementTree.parse("plan.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert refused(1, "tiny", *SMALL, "--svg", "nowhere/plan.svg") == (
        "nowhere/plan.svg: cannot be written: No such file or directory\n  -> give another --svg FILE\n"
    )


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        (
            1,
            ["tiny", "--devices", "8", "--mesh", "tensor=4"],
            "--mesh: tensor 4 takes 4 devices, but there are 8\n  -> change one of them\n",
        ),
        (
            2,
            ["gpt2-smal"],
            "gpt2-smal: no recipe, no directory, no preset and no hub id\n  -> did you mean gpt2?\n",
        ),
        (
            2,
            ["tiny", "--device-memory", "80 apples"],
            "--device-memory: '80 apples' is no amount of memory\n"
            "  -> write such as 80GiB, 40GB, 16g or a number of bytes\n",
        ),
        (
            2,
            ["tiny", "--mesh", "model=2"],
            "--mesh: 'model' is no mesh axis\n  -> known: data, fsdp, tensor\n",
        ),
        (
            2,
            ["quickstart", "--seq-length", "5"],
            "--seq-length: quickstart is a recipe, whose data decide how long examples are\n"
            "  -> leave it out, and change data.max_length in the recipe\n",
        ),
        (
            1,
            ["somebody/else"],
            "somebody/else: model.name: somebody/else is no local directory, and the hub cannot be reached\n"
            "  -> check the name and the network (and HF_HUB_OFFLINE), or give a local directory\n",
        ),
    ],
)
def test_what_is_wrong_is_refused(code: int, arguments: list[str], text: str) -> None:
    assert refused(code, *arguments) == text


def in_a_process(*arguments: str, before: str = "") -> tuple[str, float, int]:
    """Stdout, CPU seconds and peak KiB of a command in a process of its own, with one device."""
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    program = f"import sys, time\n{before}\nfrom redco_cli.cli import main\ntry:\n    main()\nfinally:\n    "
    program += "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]\n    "
    program += "print(peak, time.process_time(), file=sys.stderr)"
    command = [sys.executable, "-c", program, "inspect-sharding", *arguments]
    found = subprocess.run(command, env=environ, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
    peak, seconds = found.stderr.split()[-2:]
    return found.stdout, float(seconds), int(peak)


def test_the_list_needs_neither_jax_nor_transformers() -> None:
    names = ("jax", "flax", "transformers", "datasets")
    refusing = f"for name in {names!r}: sys.modules[name] = None"
    found, _, _ = in_a_process("--list", "--json", before=refusing)
    assert json.loads(found) == {"presets": list(preset_names()), "decoder_families": descriptions()}


@pytest.mark.slow
def test_opt_66b_on_64_devices_takes_seconds() -> None:
    """The goal is 15 s and 2 GiB on an idle machine."""
    settings = ["--devices", "64", "--device-memory", "32GiB", "--seq-length", "512", "--json"]
    found, seconds, peak = in_a_process("opt-66b", *settings)
    report = json.loads(found)
    assert (report["fits"], report["parameters"]) == (True, 65_719_701_504)
    assert seconds < 2 * 15
    assert peak < 2 * 2**20


def test_planning_for_a_target_leaves_the_devices_of_this_machine_alone(monkeypatch):
    """Whoever loads libtpu keeps its lock, and then the process that compiles for a TPU gets none."""
    monkeypatch.delenv("JAX_PLATFORMS")
    found = {}
    monkeypatch.setattr(
        "redco_cli.planning.inspect.inspect_sharding",
        lambda model, **_: found.setdefault(model, os.environ.get("JAX_PLATFORMS")) and {},
    )
    done("tiny", "--json")
    done("small", "--target", "v5e:2x4", "--compile", "--json")
    assert found == {"tiny": None, "small": "cpu"}
