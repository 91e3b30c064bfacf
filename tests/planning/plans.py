"""Plans made by hand, as the derivation would make them: GPT-2 medium layer by layer, and a stacked Llama."""

import math

from jax.sharding import PartitionSpec

from redco_cli.planning.report import Choice, Compiled, Memory, build_report
from redco_cli.planning.search.remedies import does_fit
from redco_cli.sharding.plan import Collective, Plan, Row

GiB = 2**30
MESH = {"data": 1, "fsdp": 4, "tensor": 2}
WHOLE = "vector of the residual stream"


def row(path, shape, spec=(), reason=WHOLE, mesh=MESH, dtype="float32"):
    """A parameter; `spec` has a string or a tuple of them for each leading dim that is split."""
    axes = [axis for dim in spec if dim for axis in ((dim,) if isinstance(dim, str) else dim)]
    gathered = [None if dim == "fsdp" else dim for dim in spec]
    size = math.prod(shape) * {"float32": 4, "bfloat16": 2}[dtype]
    per_device = size // math.prod(mesh[axis] for axis in axes)
    return Row(path, shape, dtype, PartitionSpec(*spec), PartitionSpec(*gathered), reason, size, per_device)


def gpt2_rows(layers=24, width=1024):
    """The parameters of a Flax GPT-2, in the order of its tree: `h/0`, `h/1`, `h/10`, ..."""
    rows = []
    columns, rows_reason = "columns: makes 16 heads, 8 on each device", "rows: sums over 16 heads, 8 on each device"
    up, down = "columns: makes 4096 features, 2048 on each device", "rows: sums over 4096 features, 2048 on each device"
    for layer in sorted(range(layers), key=str):
        at = f"params/transformer/h/{layer}"
        rows += [
            row(f"{at}/attn/c_attn/bias", (3 * width,), ["tensor"], columns),
            row(f"{at}/attn/c_attn/kernel", (width, 3 * width), ["fsdp", "tensor"], columns),
            row(f"{at}/attn/c_proj/bias", (width,)),
            row(f"{at}/attn/c_proj/kernel", (width, width), ["tensor", "fsdp"], rows_reason),
            row(f"{at}/ln_1/bias", (width,)),
            row(f"{at}/ln_1/scale", (width,)),
            row(f"{at}/ln_2/bias", (width,)),
            row(f"{at}/ln_2/scale", (width,)),
            row(f"{at}/mlp/c_fc/bias", (4 * width,), ["tensor"], up),
            row(f"{at}/mlp/c_fc/kernel", (width, 4 * width), ["fsdp", "tensor"], up),
            row(f"{at}/mlp/c_proj/bias", (width,)),
            row(f"{at}/mlp/c_proj/kernel", (4 * width, width), ["tensor", "fsdp"], down),
        ]
    return [
        *rows,
        row("params/transformer/ln_f/bias", (width,)),
        row("params/transformer/ln_f/scale", (width,)),
        row("params/transformer/wpe/embedding", (1024, width), [None, "fsdp"], "table that is only looked up"),
        row("params/transformer/wte/embedding", (50257, width), [None, "fsdp"], "no axis of its own that divides"),
    ]


def stacked_rows(layers=32):
    """The parameters of a decoder whose layers are scanned: Llama 3 8B in bfloat16."""

    def stack(path, shape, spec=(), reason=WHOLE):
        return row(f"params/decoder/layers/{path}", (layers, *shape), [None, *spec], reason, dtype="bfloat16")

    makes, sums = "columns: makes 32 heads, 16 on each device", "rows: sums over 32 heads, 16 on each device"
    up, down = (
        "columns: makes 14336 features, 7168 on each device",
        "rows: sums over 14336 features, 7168 on each device",
    )
    table, head = "table: 128256 rows, 64128 on each device", "columns: makes 128256 rows, 64128 on each device"
    return [
        row("params/decoder/embed/embedding", (128256, 4096), ["tensor", "fsdp"], table, dtype="bfloat16"),
        stack("attention/key/kernel", (4096, 8, 128), ["fsdp", "tensor"], makes),
        stack("attention/output/kernel", (32, 128, 4096), ["tensor", None, "fsdp"], sums),
        stack("attention/query/kernel", (4096, 32, 128), ["fsdp", "tensor"], makes),
        stack("attention/value/kernel", (4096, 8, 128), ["fsdp", "tensor"], makes),
        stack("attention_norm/scale", (4096,)),
        stack("mlp/down/kernel", (14336, 4096), ["tensor", "fsdp"], down),
        stack("mlp/gate/kernel", (4096, 14336), ["fsdp", "tensor"], up),
        stack("mlp/up/kernel", (4096, 14336), ["fsdp", "tensor"], up),
        stack("mlp_norm/scale", (4096,)),
        row("params/decoder/norm/scale", (4096,), dtype="bfloat16"),
        row("params/head/kernel", (4096, 128256), ["fsdp", "tensor"], head, dtype="bfloat16"),
    ]


COLLECTIVES = (
    Collective("all-gather", "fsdp", "weights of h, where they are used", 96, 1_409_286_144),
    Collective("all-reduce", "tensor", "activations after attn/c_proj and mlp/c_proj", 96, 805_306_368),
    Collective("reduce-scatter", "fsdp", "gradients", 148, 177_411_584),
)


def plan_of(rows, mesh=MESH, warnings=()):
    return Plan(mesh, None, None, None, tuple(rows), COLLECTIVES, tuple(warnings))


def report_of(rows, model="gpt2-medium", mesh=MESH, warnings=(), **changes):
    """A report on eight devices; `changes` replace what `build_report` gets."""
    plan = plan_of(rows, mesh, warnings)
    held = plan.bytes_per_device
    memory = Memory(held, held, 2 * held, 3 * GiB // 2, GiB, 131_072, 25_165_824, 0)
    given = {
        "model": model,
        "chosen": Choice(mesh, "full", 8, memory.total, 2_392_004_096, "least traffic of the meshes that fit"),
        "memory": memory,
        "global_batch_size": 64,
        "seq_length": 1024,
        **changes,
    }
    fits = does_fit(given["memory"].total, given.get("compiled"), given.get("device_memory"))
    return build_report(plan, **{"fits": fits, **given})


RUNNERS_UP = (
    Choice({"data": 1, "fsdp": 8, "tensor": 1}, "full", 8, 3_543_348_019, 4_294_967_296, "more traffic"),
    Choice({"data": 8, "fsdp": 1, "tensor": 1}, "none", 16, 12_884_901_888, 1_419_292_672, "does not fit"),
)
COMPILED = Compiled(
    3_758_096_384,
    (
        Collective("all-gather", "fsdp", "", 120, 1_400_000_000),
        Collective("all-reduce", "tensor", "", 98, 805_400_000),
        Collective("all-reduce", "fsdp", "", 2, 64),
    ),
    7.25,
    overlapped=None,
    host=0,
    attention=(),
    launches=0,
    largest=(),
    target=None,
    too_large=None,
)
