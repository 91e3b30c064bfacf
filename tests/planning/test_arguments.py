"""Amounts of memory and meshes as they are written on the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redco_cli.console.numbers import format_bytes
from redco_cli.errors import EXIT_USAGE, UsageError
from redco_cli.planning import arguments
from redco_cli.planning.arguments import parse_bytes, parse_mesh
from redco_cli.runtime import platforms
from redco_cli.sharding.plan import AXES

GIB = 2**30
WRITE_BYTES = "\n  -> write such as 80GiB, 40GB, 16g or a number of bytes"
GIVE_MEMORY = "\n  -> give the memory of one device, such as 80GiB"
WRITE_MESH = "\n  -> write such as data=1,fsdp=4,tensor=2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * GIB),
        ("80 gib", 80 * GIB),
        ("40GB", 40_000_000_000),
        ("40gb", 40_000_000_000),
        ("16g", 16 * GIB),
        ("16Gi", 16 * GIB),
        (" 1.5T ", 3 * 2**39),
        ("0.1GB", 100_000_000),
        ("0.3g", 322_122_547),
        ("512k", 2**19),
        ("512KB", 512_000),
        ("24 MiB", 24 * 2**20),
        ("1PB", 10**15),
        ("17179869184", 16 * GIB),
        ("1 B", 1),
        ("100 bytes", 100),
    ],
)
def test_amounts(text, expected):
    assert parse_bytes(text, "--device-memory") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no amount of memory" + WRITE_BYTES),
        ("lots", "'lots' is no amount of memory" + WRITE_BYTES),
        ("80 gibs", "'80 gibs' is no amount of memory" + WRITE_BYTES),
        ("-8g", "'-8g' is no amount of memory" + WRITE_BYTES),
        ("1e9", "'1e9' is no amount of memory" + WRITE_BYTES),
        ("80,000", "'80,000' is no amount of memory" + WRITE_BYTES),
        ("nan", "'nan' is no amount of memory" + WRITE_BYTES),
        ("8GiB\n8GiB", "'8GiB\\n8GiB' is no amount of memory" + WRITE_BYTES),
        ("\u0668g", "'\u0668g' is no amount of memory" + WRITE_BYTES),
        ("9" * 5000, f"'{'9' * 40}...' is no amount of memory" + WRITE_BYTES),
        ("0", "'0' is 0 B" + GIVE_MEMORY),
        ("0.4", "'0.4' is 0 B" + GIVE_MEMORY),
        ("1025PiB", "'1025PiB' is 1025 PiB" + GIVE_MEMORY),
    ],
)
def test_no_amounts(text, message):
    with pytest.raises(UsageError) as error:
        parse_bytes(text, "--device-memory")
    assert str(error.value) == f"--device-memory: {message}"
    assert error.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (102_298, "99.9 KiB"),
        (102_400, "100 KiB"),
        (2**20 - 1, "1 MiB"),
        (1_643_000_000, "1.53 GiB"),
        (19.2 * GIB, "19.2 GiB"),
        (32 * GIB, "32 GiB"),
        (1000 * GIB, "1000 GiB"),
        (3 * 2**60, "3072 PiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_formatted(count, text):
    assert format_bytes(count) == text


@given(st.integers(min_value=1, max_value=2**60))
@example(1070)  # 1.04 KiB are 1064.96 bytes, and what is read is rounded down
def test_what_is_formatted_reads_back_within_half_of_its_third_digit_and_a_byte(count):
    assert abs(parse_bytes(format_bytes(count), "") - count) <= 0.005 * count + 1


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("data=1,fsdp=4,tensor=2", {"data": 1, "fsdp": 4, "tensor": 2}),
        ("tensor = 2, data=16", {"data": 16, "fsdp": 1, "tensor": 2}),
        ("fsdp=1024", {"data": 1, "fsdp": 1024, "tensor": 1}),
    ],
)
def test_meshes(text, mesh):
    parsed = parse_mesh(text, "--mesh")
    assert parsed == mesh
    assert list(parsed) == ["data", "fsdp", "tensor"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no axis with a size" + WRITE_MESH),
        ("8", "'8' is no axis with a size" + WRITE_MESH),
        ("data=2,", "'' is no axis with a size" + WRITE_MESH),
        ("fsdb=4", "'fsdb' is no mesh axis\n  -> did you mean fsdp?"),
        ("x=4", "'x' is no mesh axis\n  -> known: data, fsdp, tensor"),
        ("data=2,data=2", "data is given twice\n  -> give each axis once"),
        ("data=0", "data='0' given, but a mesh axis has 1 to 9999999 devices\n  -> write such as data=2"),
        ("tensor=-1", "tensor='-1' given, but a mesh axis has 1 to 9999999 devices\n  -> write such as tensor=2"),
        ("fsdp=10000000", "fsdp='10000000' given, but a mesh axis has 1 to 9999999 devices\n  -> write such as fsdp=2"),
        ("fsdp=two", "fsdp='two' given, but a mesh axis has 1 to 9999999 devices\n  -> write such as fsdp=2"),
        ("fsdp=4=2", "fsdp='4=2' given, but a mesh axis has 1 to 9999999 devices\n  -> write such as fsdp=2"),
    ],
)
def test_no_meshes(text, message):
    with pytest.raises(UsageError) as error:
        parse_mesh(text, "--mesh")
    assert str(error.value) == f"--mesh: {message}"


def test_the_axes_are_those_of_a_plan():
    assert arguments.AXES == AXES


def test_arguments_are_read_without_jax():
    code = "import sys, redco_cli.planning.arguments; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("gpus", "visible", "model", "mesh", "target", "simulated"),
    [
        (["NVIDIA H200"], None, "quickstart", None, "h200:1", None),
        (["NVIDIA H100 80GB HBM3"] * 8, None, "llama-3.1-8b", None, "h100:8", None),
        (["NVIDIA H100 80GB HBM3"] * 8, "0,3", "llama-3.1-8b", None, "h100:2", None),
        (["NVIDIA H100 80GB HBM3"] * 8, None, "llama-3.1-8b", {"data": 1, "fsdp": 4, "tensor": 1}, "h100:4", None),
        (["NVIDIA H100 80GB HBM3"] * 8, None, "llama-3.1-8b", {"data": 1, "fsdp": 1, "tensor": 1}, "h100:1", None),
        (["NVIDIA H200"], None, "llama-3.1-8b", {"data": 1, "fsdp": 4, "tensor": 1}, None, 4),
        (["NVIDIA GeForce RTX 4090"], None, "llama-3.1-8b", None, None, 1),
        (["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], None, "llama-3.1-8b", None, None, 1),
        (["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], "1", "llama-3.1-8b", None, None, 1),
        (["NVIDIA H200"], "-1", "llama-3.1-8b", None, None, 1),
        (["NVIDIA H200"], "", "llama-3.1-8b", None, None, 1),
        ([], None, "llama-3.1-8b", {"data": 2, "fsdp": 2, "tensor": 2}, None, 8),
    ],
)
def test_what_is_compiled_for_without_a_target(
    gpus: list[str],
    visible: str | None,
    model: str,
    mesh: dict[str, int] | None,
    target: str | None,
    simulated: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPUs of this machine, by what their driver says; where there are none, CPUs are simulated."""
    for number, name in enumerate(gpus):
        described = tmp_path / f"0000:0{number}:00.0" / "information"
        described.parent.mkdir()
        described.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 41\nGPU Excluded:\t No\n")
    monkeypatch.setattr(platforms, "_GPUS", str(tmp_path / "*" / "information"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked: list[int] = []
    monkeypatch.setattr(arguments, "simulate_devices", asked.append)
    assert arguments.devices_to_compile_for(model, None, None, mesh) == target
    assert asked == ([] if simulated is None else [simulated])


def test_devices_that_are_counted_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "gpus_here", lambda: ["NVIDIA H200"] * 8)
    asked: list[int] = []
    monkeypatch.setattr(arguments, "simulate_devices", asked.append)
    assert arguments.devices_to_compile_for("llama-3.1-8b", 8, None, None) is None
    assert asked == [8]
