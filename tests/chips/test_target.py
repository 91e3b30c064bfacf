"""Devices as they are typed, and programs that are built for them on a machine that has none."""

import json
from types import SimpleNamespace

import jax
import pytest

from redco_cli.chips.table import CHIPS
from redco_cli.chips.target import chip_of, current_platform, parse_target, targeting
from redco_cli.errors import UsageError
from redco_cli.planning.devices import devices_here
from redco_cli.planning.inspect import inspect
from redco_cli.planning.workload import find_workload
from redco_cli.plugin.state import Variables
from tests.projects import LLAMA


@pytest.mark.parametrize(
    ("typed", "said", "devices", "of_a_group"),
    [
        ("h100:8", "h100:8", 8, 8),
        ("H100", "h100:1", 1, 1),
        ("h100:64", "8*h100:8", 64, 8),
        ("2*h100:4", "2*h100:4", 8, 4),
        ("v5e:4x4", "v5e:4x4", 16, 16),
        ("2*v6e:16x16", "2*v6e:16x16", 512, 256),
        ("v5p:4x4x4", "v5p:4x4x4", 64, 64),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, 8),
    ],
)
def test_what_is_typed(typed, said, devices, of_a_group):
    target = parse_target(typed, "--target")
    assert (str(target), target.devices, target.of_a_group) == (said, devices, of_a_group)
    assert parse_target(str(target), "--target") == target


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("h10:8", "h10 is no chip that is known"),
        ("h100:12", "12 devices do not fill hosts of 8"),
        ("h100:2x4", "the devices of h100 are counted"),
        ("v5e:8", "v5e:8 has 1 sizes, but slices of v5e have 2"),
        ("v5p:4x4", "slices of v5p have 3"),
        ("v6e:3x5", "v6e has no slice of 3x5: a slice has 1, 2, 4, 8 or 16 chips along each dim, and 256 in all"),
        ("v5e:32x32", "v5e has no slice of 32x32"),
        ("v5p:4x4x6", "v5p has no slice of 4x4x6: a slice has 1, 2 or a multiple of 4 chips along each dim"),
        ("tpu7x:32x32x32", "9,216 in all at most"),
        ("0*h100:8", "names no devices"),
        ("", "names no devices"),
    ],
)
def test_what_is_no_target(typed, problem):
    with pytest.raises(UsageError, match="--target: ") as refused:
        parse_target(typed, "--target")
    assert problem in str(refused.value)
    assert "->" in str(refused.value)


def test_every_chip_is_whole():
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)
    assert all(chip_of(kind) is chip for chip in CHIPS.values() for kind in chip.kinds)
    for chip in CHIPS.values():
        assert chip.flops["bfloat16"] > 1e14
        assert 1e9 < chip.network < chip.link < chip.bandwidth
        assert 0 < chip.usable <= chip.memory
        assert (chip.platform == "gpu") == (chip.multiprocessors is not None) == (chip.torus == 0)


def attention_of(target, head_dim=64, seq_length=32):
    """The names of the operations of a gradient that is traced for some devices."""
    with targeting(None if target is None else parse_target(target, "--target")):
        workload = find_workload(json.dumps({**LLAMA, "head_dim": head_dim}), batch_size=8, seq_length=seq_length)
        given, batch = workload.abstract, workload.batch(8)

        def loss(params, batch):
            return workload.loss(Variables(params, step=given.step), batch, None).sum

        return str(jax.make_jaxpr(jax.grad(loss))(given.params, batch))


def test_a_gpu_runs_its_own_attention_wherever_it_is_planned():
    assert current_platform() == "cpu"
    assert "dot_product_attention_fwd" in attention_of("h100:8")
    assert "dot_product_attention_fwd" not in attention_of("v5e:2x4")
    assert "dot_product_attention_fwd" not in attention_of(None)
    assert current_platform() == "cpu"


def test_padding_is_no_mask_for_a_gpu():
    """A mask would be written to memory as a bias for every pair of tokens, none of which the kernel could skip."""
    found = attention_of("h100:8")
    assert "8,32,1,1" not in found
    assert "8,1,32,32" not in found
    assert "variadic_args=(False, False)" in found


@pytest.mark.parametrize(("target", "fused"), [("h100:8", True), ("a100:8", False), ("b200:8", False)])
def test_heads_of_256_have_a_kernel_on_hopper(target, fused):
    assert ("dot_product_attention_fwd" in attention_of(target, head_dim=256)) == fused


def test_odd_lengths_have_a_gradient_by_another_kernel():
    """JAX refuses cuDNN's for them, as it takes the place of a bias for one."""
    found = attention_of("h100:8", seq_length=257)
    assert "dot_product_attention_fwd" not in found
    assert "flash_backward_dq" in found


@pytest.mark.parametrize(
    ("kind", "slices", "chip", "groups"),
    [("TPU v6 lite", 2, "v6e", 2), ("NVIDIA H100 80GB HBM3", 1, "h100", 1), ("some other", 1, None, 1)],
)
def test_a_real_machine_is_its_own_target(monkeypatch, kind, slices, chip, groups):
    devices = [SimpleNamespace(device_kind=kind, slice_index=number % slices) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    found = devices_here(8, 2**34)
    assert (found.count, found.hosts, found.chip) == (8, groups, None if chip is None else CHIPS[chip])


def test_a_plan_is_one_for_the_target():
    plan = {"batch_size": 16, "seq_length": 32}
    on_gpu = inspect(json.dumps(LLAMA), target="2*h100:4", **plan)
    assert (on_gpu.target, on_gpu.devices, on_gpu.dtype) == ("2*h100:4", 8, "bfloat16")
    assert on_gpu.device_memory == CHIPS["h100"].usable
    with pytest.raises(UsageError, match=r"--devices: 8 given beside --target h100:8"):
        inspect(json.dumps(LLAMA), target="h100:8", devices=8, **plan)
    with pytest.raises(Exception, match=r"fsdp 4 takes 4 devices, but there are 8"):
        inspect(json.dumps(LLAMA), target="h100:8", mesh={"fsdp": 4}, **plan)
