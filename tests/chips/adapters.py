"""What the compiler of a GPU makes of the weights beside an adapter: which arrays of their size a step writes.

`python -m tests.chips.adapters` compiles the steps and writes `adapters.json`; `make test-chips` does so too. The
ordinary tests read that file.
"""

import json
import math
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from redco_cli.chips.target import parse_target, targeting
from redco_cli.planning.compiled import Way, lower_step
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Planner
from redco_cli.planning.targets.deviceless import target_mesh
from redco_cli.planning.workload import recipe_workload
from redco_cli.sharding.compiled import schedule
from redco_cli.sharding.compiled.traffic import compiled_collectives
from tests.chips.programs import digest_of

RECIPE = Path(__file__).parent / "adapted" / "recipe.yaml"
RESULTS = Path(__file__).with_name("adapters.json")
TOKENS = 5
"""A factor of the number of tokens, and of no size of a weight: what it divides is no weight."""
SMALLEST = 512 * 256
"""Numbers in the smallest weight of a layer: the keys'."""


@dataclass(frozen=True)
class Beside:
    """Weights as they are kept beside an adapter, and the devices that have them."""

    quantize: str
    devices: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """All devices share the weights."""
        return {"data": 1, "fsdp": self.devices, "tensor": 1}


STEPS = {
    "bfloat16, h100:1": Beside("null"),
    "nf4, h100:1": Beside("nf4"),
    "int8, h100:1": Beside("int8"),
    "nf4, h100:4": Beside("nf4", 4),
}


@contextmanager
def way_of(beside: Beside):
    """The step of the recipe, with the mesh of its target and its fingerprint; JAX traces for that meanwhile."""
    target, batch = parse_target(f"h100:{beside.devices}", "--target"), 2 * beside.devices
    with targeting(target):
        changes = [f"adapter.quantize={beside.quantize}", f"train.global_batch_size={batch}"]
        workload = recipe_workload(str(RECIPE), changes)
        plan = Planner(workload, Devices(beside.devices, 1, None), batch).plan(beside.mesh)
        yield Way(workload, plan, batch, False), target


def fingerprint(beside: Beside) -> str:
    """Of everything that decides what is compiled, but for the compiler."""
    with way_of(beside) as (way, _):
        return digest_of(way.workload, way.plan, way.micro_batch_size)


def compiled(beside: Beside) -> dict[str, object]:
    """What the compiler says: memory, every array that may be a weight, and what is gathered."""
    with way_of(beside) as (way, target):
        lowered = lower_step(way, target_mesh(target, beside.mesh))
    found = lowered.compile()
    text, memory = found.as_text(), found.memory_analysis()
    schedule._LARGEST = sys.maxsize
    written: dict[str, int] = {}
    for array in schedule.compiled_kernels(text).largest:
        size = math.prod(map(int, re.findall(r"\d+", array.shape.partition("[")[2])))
        if size >= SMALLEST and size % TOKENS:
            written[array.shape] = written.get(array.shape, 0) + array.times
    return {
        "fingerprint": fingerprint(beside),
        "jax": jax.__version__,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "written": dict(sorted(written.items())),
        "gathered": sorted({one.shape for one in compiled_collectives(text, beside.mesh) if one.kind == "all-gather"}),
    }


if __name__ == "__main__":
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in sys.argv[1:] or STEPS:
        results[name] = compiled(STEPS[name])
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
