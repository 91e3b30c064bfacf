"""JAX is kept from trying the compilers of chips that a machine does not have, and from nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redco_cli.chips.table import CHIPS
from redco_cli.runtime import platforms


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the system of a Linux machine without an accelerator."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platforms, "_DEVICE_FILES", (f"{tmp_path}/nvidia*", f"{tmp_path}/accel*"))
    monkeypatch.setattr(platforms, "_PCI_VENDORS", f"{tmp_path}/*/vendor")
    monkeypatch.setattr(platforms, "_plugins", lambda: ["xla_cuda12"])
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    _plug_in(tmp_path, "network", "0x1af4")
    return tmp_path


def _plug_in(system: Path, name: str, vendor: str) -> None:
    (system / name).mkdir()
    (system / name / "vendor").write_text(f"{vendor}\n")


def test_a_machine_without_chips_starts_the_cpu_alone(bare: Path) -> None:
    platforms.leave_out_missing_devices()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(("name", "vendor"), [("gpu", "0x10de"), ("tpu", "0x1ae0")])
def test_a_chip_without_a_driver_is_left_to_jax(bare: Path, name: str, vendor: str) -> None:
    _plug_in(bare, name, vendor)
    platforms.leave_out_missing_devices()
    assert "JAX_PLATFORMS" not in os.environ


@pytest.mark.parametrize("name", ["nvidia3", "nvidiactl", "accel0"])
def test_a_device_file_is_left_to_jax(bare: Path, name: str) -> None:
    (bare / name).touch()
    platforms.leave_out_missing_devices()
    assert "JAX_PLATFORMS" not in os.environ


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_left_to_jax(bare: Path, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    platforms.leave_out_missing_devices()
    assert "JAX_PLATFORMS" not in os.environ


def test_plugins_of_other_makers_are_left_to_jax(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_plugins", lambda: ["xla_cuda12", "xla_rocm7"])
    platforms.leave_out_missing_devices()
    assert "JAX_PLATFORMS" not in os.environ


def test_what_the_user_asks_for_holds(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    platforms.leave_out_missing_devices()
    assert os.environ["JAX_PLATFORMS"] == "cuda"


def test_plugins_are_found_in_their_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax_plugins" / "xla_cuda99").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "__pycache__").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert "xla_cuda99" in platforms._plugins()
    assert not [name for name in platforms._plugins() if name.startswith("_")]


@pytest.mark.parametrize(
    ("before", "cores", "after"),
    [(None, 2, "32"), (None, 64, None), ("64", 2, "64"), ("2", 64, "32"), ("many", 2, "32")],
)
def test_simulated_devices_have_threads_to_wait_in(
    before: str | None, cores: int, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least four each: with one each, half of the devices in one collective and half in another wait for ever."""
    monkeypatch.setattr(platforms, "own_cores", lambda: cores)
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    if before is not None:
        monkeypatch.setenv("PJRT_NPROC", before)
    platforms.simulate_devices(8)
    assert os.environ.get("PJRT_NPROC") == after


@pytest.mark.parametrize("given", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_gpu_is_filled_as_plans_fill_it(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "0.5")
    platforms.take_gpu_memory()
    chip = CHIPS["h100"]
    if given is None:
        assert chip.usable == int(float(os.environ["XLA_CLIENT_MEM_FRACTION"]) * chip.memory)
    else:  # JAX refuses both
        assert {name for name in os.environ if name.endswith("MEM_FRACTION")} == {given}


@pytest.fixture
def begun(bare: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """How this process was begun anew, where Linux gives large pages to who asks."""
    found: list[list[str]] = []
    _pages(bare, "always [madvise] never", monkeypatch)
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setattr(os, "execv", lambda _path, arguments: found.append(arguments))
    return found


def _pages(system: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "enabled").write_text(text)
    monkeypatch.setattr(platforms, "_PAGES", system / "enabled")


@pytest.mark.parametrize("given", ["", "glibc.malloc.arena_max=2"])
def test_a_process_begins_again_as_it_was_begun_with_large_pages(
    begun: list[list[str]], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    platforms.begin_again_with_large_pages()
    platforms.begin_again_with_large_pages()
    assert begun == [[sys.executable, *sys.orig_argv[1:]]]  # once
    assert os.environ["GLIBC_TUNABLES"].split(":") == [*given.split(":")] * bool(given) + ["glibc.malloc.hugetlb=1"]


@pytest.mark.parametrize("why", ["others decide", "for all", "a GPU"])
def test_a_process_goes_on_where_large_pages_are_not_its_to_take(
    why: str, bare: Path, begun: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "others decide":
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    if why == "for all":
        _pages(bare, "[always] madvise never", monkeypatch)
    if why == "a GPU":
        _plug_in(bare, "gpu", "0x10de")
    platforms.begin_again_with_large_pages()
    assert not begun
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    platforms.begin_again_with_large_pages()
    assert len(begun) == (why == "a GPU")  # that is not to be used


def test_what_begins_again_is_the_same_process(tmp_path: Path) -> None:
    """With its number, arguments and signals that came meanwhile."""
    (tmp_path / "enabled").write_text("always [madvise] never")
    script = tmp_path / "train"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "from redco_cli import __main__\n"
        "from redco_cli.runtime import platforms\n"
        f"platforms._PAGES = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print(os.getpid(), sys.argv[1:], os.environ.get('GLIBC_TUNABLES'), flush=True)\n"
        "begin = platforms.begin_again_with_large_pages\n"
        "platforms.begin_again_with_large_pages = lambda: (os.kill(os.getpid(), signal.SIGTERM), begin())\n"
        "__main__._take_large_pages()\n"
        "__main__.hear_early()\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"} | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, script, "a b", "c"], env=environ, capture_output=True, text=True)
    first, second = ran.stdout.splitlines()
    assert second == first.replace("None", "glibc.malloc.hugetlb=1")
    assert "'a b', 'c'" in first
    assert (ran.returncode, ran.stderr) == (75, "SIGTERM: nothing was to be saved\n")
