"""The steps that are compiled for GPUs and TPUs, and what tells whether what was compiled is still what would be.

`python -m tests.chips.programs` compiles them and writes `results.json`; `make test-chips` does so in an environment
that has the compilers. The ordinary tests read that file: where a program has changed since, they say so.
"""

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax

from redco_cli.chips.target import parse_target, targeting
from redco_cli.models.decoder.block import Remat
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option
from redco_cli.planning.search.ways import options
from redco_cli.planning.targets.compile import compile_for
from redco_cli.planning.workload import Workload, find_workload
from redco_cli.sharding.plan import Collective, Plan
from redco_cli.sharding.rings import sent_bytes

RESULTS = Path(__file__).with_name("results.json")
TINY = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 4096,
    }
)
SOURCES = (
    *("training/step.py", "planning/compiled.py"),
    *(
        "sharding/gather/gathering.py",
        "sharding/gather/sharded.py",
        "sharding/gather/all_gather.py",
        "sharding/gather/by_rows.py",
        "sharding/gather/fused.py",
        "sharding/gather/unpartitioned.py",
        "sharding/gather/conditionals.py",
        "sharding/gather/replicas.py",
        "sharding/gather/torus.py",
    ),
    *("chips/table.py", "chips/compiler.py"),
)
"""What decides the compiled program beyond the traced loss and its plan."""


@dataclass(frozen=True)
class Program:
    """A step, and the devices that it is compiled for."""

    model: str
    target: str
    mesh: dict[str, int]
    batch_size: int
    seq_length: int
    remat: Remat = "none"


PROGRAMS = {
    "llama of 16 MiB, h100:8": Program(TINY, "h100:8", {"data": 1, "fsdp": 4, "tensor": 2}, 16, 512),
    "llama of 16 MiB, v5e:2x4": Program(TINY, "v5e:2x4", {"data": 1, "fsdp": 4, "tensor": 2}, 16, 512),
    "llama-3.1-8b, h100:8": Program("llama-3.1-8b", "h100:8", {"data": 1, "fsdp": 8, "tensor": 1}, 16, 4096),
}
_TEXTS = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 4096}
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 4096, "attn_pdrop": 0.0},
    "gemma3_text": {
        **_TEXTS,
        "intermediate_size": 1024,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "mixtral": {**_TEXTS, "intermediate_size": 512, "num_key_value_heads": 4, "num_local_experts": 4},
    "bert": {**_TEXTS, "intermediate_size": 1024, "max_position_embeddings": 256, "architectures": ["BertForMaskedLM"]},
    "t5": {
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 1024,
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": 4096,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 1024,
        "image_size": 128,
        "patch_size": 8,
        "architectures": ["ViTForImageClassification"],
    },
}
"""One of each kind of model, two layers of it."""
SMALL_BATCH, SMALL_LENGTH = 16, 256
BUDGETED = {
    f"{family}, {target}": Program(
        json.dumps({"model_type": family, **config}),
        target,
        {"data": 1, "fsdp": 4, "tensor": 2},
        SMALL_BATCH,
        SMALL_LENGTH,
    )
    for family, config in FAMILIES.items()
    for target in ("h100:8", "v5e:2x4")
}
"""What each of them moves is judged by `test_budgets`."""
REPLICATED = {
    f"llama on data 2, {target}": Program(TINY, target, {"data": 2, "fsdp": 4, "tensor": 1}, SMALL_BATCH, SMALL_LENGTH)
    for target in ("h100:8", "v5e:2x4")
}
"""On a mesh of replicas; likewise."""
RECOMPUTED = {
    f"llama, remat {remat}, {target}": Program(TINY, target, {"data": 1, "fsdp": 8, "tensor": 1}, 64, 1024, remat)
    for target, every in (("h100:8", get_args(Remat)), ("v5e:2x4", ("attention", "offload")))
    for remat in every
}
"""With less and less kept for the backward pass; judged by `test_remat`."""
LARGER = json.dumps({**json.loads(TINY), "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2})
SQUARE = {"llama on 8 x 8, v6e": Program(LARGER, "v6e:8x8", {"data": 1, "fsdp": 64, "tensor": 1}, 64, SMALL_LENGTH)}
"""On a torus over which XLA by itself scatters no sum."""
EXPERTS = {
    f"mixtral on {target}": Program(
        json.dumps({**json.loads(LARGER), "model_type": "mixtral", "intermediate_size": 2048, "num_local_experts": 8}),
        target,
        {"data": 1, "fsdp": 64, "tensor": 1},
        64,
        SMALL_LENGTH,
    )
    for target in ("8*h100:8", "v6e:8x8")
}
"""Of many devices, for which experts are cut within each."""
BOUNDED = {
    "gemma2, h100:8": Program(
        json.dumps({"model_type": "gemma2", **FAMILIES["gemma3_text"]}),
        "h100:8",
        {"data": 1, "fsdp": 4, "tensor": 2},
        SMALL_BATCH,
        1024,
    )
}
"""Of scores that cuDNN's attention does not bound."""
VOCABULARIES = {
    f"gpt2 of {size} on {target}": Program(
        json.dumps({"model_type": "gpt2", **FAMILIES["gpt2"], "vocab_size": size}),
        target,
        {"data": 2, "fsdp": 2, "tensor": 2},
        SMALL_BATCH,
        SMALL_LENGTH,
    )
    for target in ("h100:8", "v6e:2x4")
    for size in (50257, 50304)
}
"""One that does not divide; and one whose shards are of 197 tiles of a TPU, a prime number."""
EVERY = PROGRAMS | BUDGETED | REPLICATED | RECOMPUTED | SQUARE | EXPERTS | BOUNDED | VOCABULARIES


def asked(program: Program) -> dict[str, Any]:
    has_tokens = "ForImageClassification" not in program.model
    length = program.seq_length if has_tokens else None
    return {"model": program.model, "batch_size": program.batch_size, "seq_length": length}


def planned(program: Program) -> Option:
    """The program with the memory that is predicted, where JAX traces for its target."""
    target, workload = parse_target(program.target, "--target"), find_workload(**asked(program))
    if program.remat != "none":
        assert workload.recomputing is not None
        workload = workload.recomputing(program.remat)
    devices = Devices(target.devices, target.groups, target.chip.usable, chip=target.chip)
    return options(replace(workload, recomputing=None), devices, program.mesh)[0][0]


def fingerprint(program: Program) -> str:
    """Of everything that decides what is compiled, but for the compiler."""
    with targeting(parse_target(program.target, "--target")):
        option = planned(program)
        return digest_of(option.workload, option.plan, program.batch_size)


def digest_of(workload: Workload, plan: Plan, batch_size: int) -> str:
    """The same of a workload with its plan, where JAX traces for their target."""
    traced = jax.make_jaxpr(lambda given, batch: workload.loss(given, batch, jax.random.key(0)).sum)(
        workload.abstract, workload.batch(batch_size)
    )
    package = Path(find_workload.__code__.co_filename).parents[1]
    parts = [
        re.sub(r"0x[0-9a-f]+|/[^ ]*\.py(:\d+)?", "", str(traced)),
        *(f"{row.path} {row.spec} {row.gathered} {row.usage}" for row in plan.rows),
        *((package / source).read_text() for source in SOURCES),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compiled(program: Program) -> dict[str, object]:
    """What its compiler says, and the prediction beside it."""
    target = parse_target(program.target, "--target")
    with targeting(target):
        option = planned(program)
    found = asdict(compile_for(target, option, {**asked(program), "dtype": None})[0])
    moved: dict[str, int] = {}
    for one in found["collectives"]:
        name = f"{one['kind']} over {one['axis']}"
        moved[name] = moved.get(name, 0) + one["bytes"]
    return {
        "fingerprint": fingerprint(program),
        "jax": jax.__version__,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(option.workload.abstract)),
        "predicted_memory": option.memory.total,
        "moved": moved,
        "sent": sum(sent_bytes(Collective(**one), program.mesh) for one in found["collectives"]),
        **{key: found[key] for key in ("memory", "host", "overlapped", "attention", "launches", "too_large")},
    }


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in sys.argv[1:] or EVERY:
        results[name] = compiled(EVERY[name])
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
