"""Published train steps, compiled: what happens in each, kept so that it is timed by whatever speeds are believed.

    python -m tests.chips.steps           every row, in an environment that has the compilers (`make test-chips`)
    python -m tests.chips.steps 8 26      some
    python -m tests.chips.steps --plans   every row's plan alone, which needs no compiler

The steps are ours, not those of the frameworks that were measured: where ours recomputes more, has other kernels of
attention or overlaps less, its time differs for that. Rows have the numbers that they have among the published steps
that were collected. How they differ, and why some are off:

    all      attention on TPUs runs in blocks of 512 with two kernels in its backward pass, theirs mostly in blocks of
             2,048 with one; remat `offload` keeps what a layer takes, queries, keys and values, theirs also what
             attention gives (rows 1 to 5) or less (11: no input, 12: the input alone); collectives run on sparse cores
             on v5p and v6e, as far as they fit so, theirs were fused with products
    7        their weights and optimizer state are bfloat16, which `redco train` does not have
    11       was measured with a compiler of 2024, and is 10 % slower for each operation than row 10
    12       XLA's own options: those of `train.xla: auto` need 0.01 GiB more than there are
    15       of what two and four slices cost them (6 and 15 %), the bandwidth between slices explains less than 1 %
    25       in two passes, as one takes more memory than a v5p has
    40       H100s that are limited to 500 W, with 2.4 TB/s: no factor is fitted on it, as ours have 700 W and 3.35 TB/s

Those that have no number, and 2, 6, 9 (numbers that were free), 19 and 23, were looked up when all that walks over
compiled programs stood: nothing of that was fitted on them or chosen for them. How they differ, besides:

    Mixtral  each expert has room for 1.25 times its even share and drops what is more; ours drops nothing
    23       published as operations a second, of which MaxText's formula of then (attention whole) counts 12.37e14 and
             15.96e14 a step and chip
    H100     theirs on several hosts have a network of half of the bandwidth of ours (7B); remat is not published (70B)
    H200     theirs keeps queries, keys, values and the projection after attention, too

Rows 18, 20 to 22 and 27 to 39 were not compiled: larger, or of float8, pipelines or chips that we have no table of.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from redco_cli.chips.compiler import Value
from redco_cli.chips.target import Target, parse_target, targeting
from redco_cli.models.decoder.block import Remat
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option
from redco_cli.planning.search.ways import options
from redco_cli.planning.targets.compile import compile_for
from redco_cli.planning.targets.roofline import planned_events
from redco_cli.planning.targets.speed import forward_of
from redco_cli.planning.workload import find_workload
from redco_cli.sharding.compiled.events import to_json
from tests.chips.programs import digest_of

KEPT = Path(__file__).with_name("steps.json.gz")
PASSES = 3
"""Forward passes whose products a step has, what it recomputes not counted."""


@dataclass(frozen=True)
class Step:
    """A published step.

    Attributes:
        model: a preset, or a config.
        target: the devices.
        mesh: axis to size.
        batch_size: sequences in a step.
        seq_length: tokens of each.
        seconds: of a step, as published or by what was.
        source: where.
        remat: what is recomputed, the nearest to theirs that we have.
        micro_batch_size: sequences that go through the model at once; default: all, as theirs.
        kept_in: type of the parameters.
        xla: options of the compiler; None for those of `train.xla: auto`.
    """

    model: str
    target: str
    mesh: dict[str, int]
    batch_size: int
    seq_length: int
    seconds: float
    source: str
    remat: Remat = "offload"
    micro_batch_size: int | None = None
    kept_in: str = "float32"
    xla: Mapping[str, Value] | None = field(default=None, hash=False)

    @property
    def chips(self) -> Target:
        """The devices."""
        return parse_target(self.target, "--target")

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of `find_workload`."""
        sizes = {"batch_size": self.batch_size, "seq_length": self.seq_length}
        return {"model": self.model, **sizes, "dtype": None, "kept_in": self.kept_in}


def _fsdp(size: int, data: int = 1, tensor: int = 1) -> dict[str, int]:
    return {"data": data, "fsdp": size, "tensor": tensor}


def _dense(hidden: int, heads: int, layers: int = 32) -> str:
    """MaxText's model of a `global_parameter_scale`."""
    sizes = {"hidden_size": hidden, "intermediate_size": 28672, "num_hidden_layers": layers, "head_dim": 128}
    heads_too = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return json.dumps(
        {"model_type": "llama", **sizes, **heads_too, "vocab_size": 32000, "max_position_embeddings": 2048}
    )


LLAMA_405B = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)
GEMMA_12B = json.dumps(
    {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
    }
)
MISTRAL_7B = json.dumps(
    {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "sliding_window": None,
    }
)
MIXTRAL_8X7B = json.dumps(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    }
)
_T, _X, _P = "AI-Hypercomputer/tpu-recipes", "AI-Hypercomputer/maxtext", "pytorch/torchtitan"
_G, _N = "AI-Hypercomputer/gpu-recipes", "NVIDIA DGX Cloud Benchmarking, MaxText Llama3 70B 25.02"
STEPS = {
    "1": Step("llama-3.1-8b", "v6e:2x4", _fsdp(8), 24, 8192, 3.443, _T),
    "3": Step("llama-3.1-8b", "v6e:4x8", _fsdp(32), 96, 8192, 3.495, _T),
    "5": Step("llama-3.1-8b", "v6e:8x16", _fsdp(128), 512, 8192, 4.602, _T),
    "7": Step("llama-3.1-70b", "v6e:4x8", _fsdp(32), 64, 8192, 17.790, _T, kept_in="bfloat16"),
    "8": Step("llama-3.1-70b", "v6e:8x8", _fsdp(64), 128, 8192, 18.688, _T),
    "10": Step("llama-3.1-70b", "v6e:16x16", _fsdp(256), 1280, 8192, 42.656, _T),
    "11": Step("llama-2-70b", "v6e:16x16", _fsdp(256), 512, 4096, 9.052, _T),
    "12": Step(LLAMA_405B, "2*v6e:16x16", _fsdp(512), 512, 8192, 54.803, _T, xla={}),
    "14": Step(GEMMA_12B, "v6e:16x16", _fsdp(256), 256, 32768, 7.318, _T, "full"),
    "15 on 2": Step(GEMMA_12B, "2*v6e:16x16", _fsdp(256, 2), 512, 32768, 7.793, _T, "full"),
    "15 on 4": Step(GEMMA_12B, "4*v6e:16x16", _fsdp(256, 4), 1024, 32768, 8.390, _T, "full"),
    "25": Step(_dense(8192, 64), "v5p:4x4x4", _fsdp(16, tensor=4), 384, 2048, 7.24, f"{_X}: 328 TFLOP/s", "dots", 192),
    "26": Step("llama-2-7b", "h100:8", _fsdp(8), 32, 4096, 1.503, f"{_X}: 10.5k to 11.3k tokens/s a chip", "dots"),
    "40": Step("llama-3.1-8b", "h100:8", _fsdp(8), 16, 8192, 2.458, f"{_P}: 6,667 tokens/s a chip", "dots"),
    "2": Step("llama-3.1-8b", "v6e:4x4", _fsdp(16), 48, 8192, 3.393, _T),
    "6": Step("llama-3.1-8b", "v6e:16x16", _fsdp(256), 1024, 8192, 4.546, _T),
    "9": Step("llama-3.1-70b", "v6e:8x16", _fsdp(128), 512, 8192, 34.786, _T),
    "Mistral": Step(MISTRAL_7B, "v6e:2x4", _fsdp(8), 48, 8192, 6.320, _T),
    "Mixtral": Step(MIXTRAL_8X7B, "v6e:16x16", _fsdp(256), 3072, 4096, 13.484, _T),
    "19": Step("llama-3.1-70b", "tpu7x:4x4x4", _fsdp(128), 256, 8192, 12.20, _T),
    "23 of 16B": Step(_dense(4096, 64), "v5e:16x16", _fsdp(256), 1536, 2048, 10.31, f"{_X}: 120 TFLOP/s", "full"),
    "23 of 32B": Step(_dense(8192, 64), "v5e:16x16", _fsdp(256), 1024, 2048, 12.09, f"{_X}: 132 TFLOP/s", "full"),
    "7B on H100": Step("llama-2-7b", "32*h100:8", _fsdp(8, 32), 1024, 4096, 1.500, _G, "dots"),
    "70B on H100": Step("llama-3.1-70b", "16*h100:8", _fsdp(128), 256, 8192, 15.570, _N, "attention"),
    "70B on H200": Step("llama-3.1-70b", "32*h200:8", _fsdp(128, 2), 512, 8192, 15.516, _G, "attention"),
}
FITTED = ("1", "8", "25", "26")
"""Those that the factors of `chips.speeds` were fitted on."""
JUDGED = ("1", "3", "5", "7", "8", "10", "11", "12", "14", "15 on 2", "15 on 4", "25")
"""Those with which predictions are judged."""
UNSEEN = (
    *("2", "6", "9", "Mistral", "Mixtral", "19", "23 of 16B", "23 of 32B"),
    *("7B on H100", "70B on H100", "70B on H200"),
)
"""Those that were looked up when all else stood."""


def planned(step: Step) -> Option:
    """The step as a way to run a workload, where JAX traces for its devices."""
    workload = find_workload(**step.asked)
    if step.remat != "none":
        assert workload.recomputing is not None
        workload = workload.recomputing(step.remat)
    xla = workload.xla if step.xla is None else step.xla
    size = step.micro_batch_size or step.batch_size
    workload = replace(workload, recomputing=None, micro_batch_size=size, xla=xla)
    chips = step.chips
    devices = Devices(chips.devices, chips.groups, chips.chip.usable, chip=chips.chip)
    return options(workload, devices, step.mesh)[0][0]


def fingerprint(step: Step) -> str:
    """Of everything that decides what is compiled, but for the compiler."""
    with targeting(step.chips):
        option = planned(step)
        return digest_of(option.workload, option.plan, step.micro_batch_size or step.batch_size)


def foreseen(step: Step) -> dict[str, Any]:
    """A step by its plan, which needs no compiler."""
    with targeting(step.chips):
        option = planned(step)
        products = forward_of(option.workload).products
        return {
            "flops": PASSES * products.flops,
            "fits by the plan": option.fits(step.chips.chip.usable),
            "plan": to_json(planned_events(option, products, PASSES, step.chips)),
        }


def recorded(step: Step) -> dict[str, Any]:
    """A step compiled, and planned."""
    with targeting(step.chips):
        option = planned(step)
        print_of = digest_of(option.workload, option.plan, step.micro_batch_size or step.batch_size)
    found, events = compile_for(step.chips, option, step.asked)
    if events is None:
        raise SystemExit(f"does not fit: {found.too_large}")
    return {
        **foreseen(step),
        "fingerprint": print_of,
        "jax": jax.__version__,
        "memory": found.memory,
        "timeline": to_json(events),
        "asked": {key: value for key, value in asdict(step).items() if key not in ("source", "seconds")},
    }


def kept() -> dict[str, dict[str, Any]]:
    """What was compiled, by row."""
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(KEPT.read_bytes())) if KEPT.is_file() else {}
    return found


if __name__ == "__main__":
    by_plan, *names = sys.argv[1:] if "--plans" in sys.argv[1:2] else ("", *sys.argv[1:])
    for name in names or STEPS:
        print(name, flush=True)
        found = {**kept()[name], **foreseen(STEPS[name])} if by_plan else recorded(STEPS[name])
        text = json.dumps({**kept(), name: found})
        KEPT.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
