"""Predicted beside compiled memory and traffic of train steps at the widths of real models, for devices not there.

    python -m tests.chips.predicted h100:8            every model on a mesh of its own, where compilers are installed
    python -m tests.chips.predicted h100:8 gpt2-xl    some
    python -m tests.chips.predicted h100:8 --cube     all on data 2 x fsdp 2 x tensor 2

As `make test-chips`, which builds that environment, it needs `JAX_PLATFORMS=cpu`. Computed in bfloat16 over float32
parameters, with AdamW; encoders and encoder-decoders with their dropout, some models with fewer layers than they have.
Traffic is what one device sends in a step.
"""

import argparse
import json
import statistics

from redco_cli.chips.target import parse_target, targeting
from redco_cli.errors import RedcoError
from redco_cli.planning.targets.compile import compile_for
from redco_cli.sharding.rings import sent_bytes
from tests.chips.programs import Program, asked, planned

_FSDP, _CUBE = {"data": 1, "fsdp": 8, "tensor": 1}, {"data": 2, "fsdp": 2, "tensor": 2}


def _large(model_type: str, **sizes: object) -> str:
    heads = {"num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return json.dumps({"model_type": model_type, "hidden_size": 1024, **heads, **sizes})


_BART = {
    "encoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
}
_T5 = {"d_kv": 64, "d_ff": 4096, "num_heads": 16, "num_layers": 6, "decoder_start_token_id": 0}
_GPT2 = {"n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_OLMO2 = {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16}
_EXPERTS = {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048}
MODELS = {
    "llama-3.1-8b": ("llama-3.1-8b", _FSDP, 16, 4096, "none"),
    "llama-3.1-8b, remat full": ("llama-3.1-8b", _FSDP, 16, 8192, "full"),
    "qwen3-0.6b": ("qwen3-0.6b", _FSDP, 32, 2048, "none"),
    "gpt2-xl": (json.dumps({"model_type": "gpt2", **_GPT2, **_NO_DROPOUT}), _FSDP, 32, 1024, "none"),
    "gpt2-medium": (
        json.dumps({"model_type": "gpt2", **_GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, **_NO_DROPOUT}),
        _CUBE,
        32,
        1024,
        "none",
    ),
    "olmo2, remat full": (
        json.dumps({"model_type": "olmo2", **_OLMO2, "intermediate_size": 8192, "vocab_size": 100352}),
        _CUBE,
        32,
        512,
        "full",
    ),
    "mixtral": (
        _large("mixtral", **_EXPERTS, num_hidden_layers=8, num_local_experts=8, vocab_size=32000),
        _FSDP,
        16,
        2048,
        "none",
    ),
    "qwen3 of experts": (
        _large(
            "qwen3_moe",
            **_EXPERTS,
            num_hidden_layers=4,
            num_experts=32,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            head_dim=128,
            vocab_size=151936,
        ),
        _FSDP,
        16,
        2048,
        "none",
    ),
    "bert-large": (_large("bert", vocab_size=30522, architectures=["BertForMaskedLM"]), _CUBE, 64, 512, "none"),
    "roberta-large": (
        _large("roberta", vocab_size=50265, max_position_embeddings=514, architectures=["RobertaForMaskedLM"]),
        _FSDP,
        64,
        512,
        "none",
    ),
    "t5": (json.dumps({"model_type": "t5", "d_model": 1024, **_T5, "vocab_size": 32128}), _FSDP, 64, 512, "none"),
    "bart-large": (
        json.dumps(
            {
                "model_type": "bart",
                "d_model": 1024,
                **_BART,
                "vocab_size": 50265,
                "architectures": ["BartForConditionalGeneration"],
            }
        ),
        _FSDP,
        64,
        512,
        "none",
    ),
    "vit-large": (
        _large("vit", image_size=224, patch_size=16, architectures=["ViTForImageClassification"]),
        _FSDP,
        256,
        512,
        "none",
    ),
    "dinov2-large": (
        json.dumps(
            {
                "model_type": "dinov2",
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 224,
                "patch_size": 14,
                "architectures": ["Dinov2ForImageClassification"],
            }
        ),
        _FSDP,
        256,
        512,
        "none",
    ),
    "beit-large": (
        _large("beit", image_size=224, patch_size=16, architectures=["BeitForImageClassification"]),
        _FSDP,
        256,
        512,
        "none",
    ),
    "resnet-50": (
        json.dumps({"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}),
        _FSDP,
        256,
        512,
        "none",
    ),
}
"""A model, mesh, examples, tokens of each, and remat."""


def compared(name: str, target: str, mesh: dict[str, int]) -> tuple[float, float] | None:
    """Predicted over compiled bytes of one step, allocated and sent; None where it does not fit."""
    model, own, batch, length, remat = MODELS[name]
    program, devices = Program(model, target, mesh or own, batch, length, remat), parse_target(target, "target")  # type: ignore[arg-type]
    try:
        with targeting(devices):
            option = planned(program)
    except RedcoError as refused:
        print(f"| {name} | {refused} |", flush=True)
        return None
    found = compile_for(devices, option, {**asked(program), "dtype": None})[0]
    moved = option.plan.collectives, found.collectives
    sent = [sum(sent_bytes(one, program.mesh) for one in each) for each in moved]
    sizes = (option.memory.total, found.memory), (sent[0], sent[1])
    cells = [f"{a / 2**30:.2f} GiB | {b / 2**30:.2f} GiB | {a / b:.2f}" for a, b in sizes if b]
    print(f"| {' | '.join([name, *cells, *filter(None, [found.too_large])])} |", flush=True)
    return None if found.too_large else (option.memory.total / (found.memory or 1), sent[0] / sent[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("names", nargs="*", metavar="name", choices=[*MODELS, []])
    parser.add_argument("--cube", action="store_true")
    given = parser.parse_args()
    print("| model | memory | compiled | ratio | traffic | compiled | ratio |\n|---|--:|--:|--:|--:|--:|--:|")
    every = [compared(name, given.target, _CUBE if given.cube else {}) for name in given.names or MODELS]
    for what, ratios in zip(("memory", "traffic"), zip(*filter(None, every), strict=True), strict=True):
        print(f"{what}: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
