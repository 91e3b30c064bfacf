"""The recipes for models of the hub, offline: tiny stand-ins of the families, trained, exported and read by PyTorch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from redco_cli.plugin.contract import IGNORED_LABEL, Context
from redco_cli.plugin.parts import builtin
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict, train, validate
from redco_cli.trained import export
from tests.plugins.conftest import collate

PROMPT = "{% if add_generation_prompt %}[assistant] {% endif %}"
SIMPLE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}" + PROMPT
THINKING = (  # as Qwen's: only the last answer is preceded by a block of thoughts, so earlier ones look different
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' and loop.last %}<t></t>{% endif %}"
    "{{ m.content }}</s>{% endfor %}" + PROMPT
)
SIZES = {
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 257,
}
MODERN = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
STAND_INS = {
    "llama_3_2_1b": (
        transformers.LlamaConfig(**MODERN, tie_word_embeddings=True, rope_theta=5e5, rope_scaling=LLAMA3),
        None,
    ),
    "llama_3_2_1b_lora": (
        transformers.LlamaConfig(**MODERN, tie_word_embeddings=True, rope_theta=5e5, rope_scaling=LLAMA3),
        SIMPLE,
    ),
    "llama_3_2_1b_qlora": (
        transformers.LlamaConfig(
            **{**MODERN, "hidden_size": 64, "head_dim": 16}, tie_word_embeddings=True, rope_theta=5e5, rope_scaling=LLAMA3
        ),
        SIMPLE,
    ),
    "qwen3_0_6b": (transformers.Qwen3Config(**MODERN, tie_word_embeddings=True, rope_theta=1e6), THINKING),
    "gemma_3_1b": (
        transformers.Gemma3TextConfig(
            **{**MODERN, "num_key_value_heads": 1, "num_hidden_layers": 3},
            sliding_window=16,
            layer_types=["sliding_attention"] * 2 + ["full_attention"],
        ),
        SIMPLE,
    ),
    "gptj_6b": (
        transformers.GPTJConfig(
            vocab_size=260,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            bos_token_id=257,
            eos_token_id=257,
        ),
        None,
    ),
}
WORDS = ("the", "cat", "that", "sat", "on", "a", "mat", "saw", "how", "rain", "fell", "over", "hills", "far", "away")


def tokenizer(template: str | None) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer of Hugging Face, whose files lie with the weights as on the hub."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "</s>"]
    bpe = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>", chat_template=template
    )


def examples(count: int, seed: int) -> list[dict[str, object]]:
    """Texts that are conversations as well."""
    generator = np.random.default_rng(seed)

    def said() -> str:
        return " ".join(generator.choice(WORDS, int(generator.integers(1, 6))))

    def turns() -> list[dict[str, str]]:
        return [{"role": role, "content": said()} for role in ("user", "assistant") * 2]

    return [{"text": said(), "messages": turns()} for _ in range(count)]


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What puts a stand-in into the place of a recipe's model and data."""
    monkeypatch.chdir(tmp_path)

    def make(recipe: str) -> list[str]:
        config, template = STAND_INS[recipe]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained("hub")
        tokenizer(template).save_pretrained("hub")
        for split, count, seed in (("train", 24, 1), ("eval", 11, 2)):
            Path(f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples(count, seed)))
        data = [
            f"data.{split}={{path: json, name: null, split: train, limit: null, data_files: {split}.jsonl}}"
            for split in ("train", "eval")
        ]
        return ["model.name=hub", *data, "data.max_length=120", "train.global_batch_size=8", "train.steps=2",
                "eval.at_start=true", "eval.every=2", "logging.plot=false", "logging.every=1",
                "predict.generation.max_new_tokens=6", "output_dir=run"]  # fmt: skip

    return make


def reference_loss(recipe: str, changes: list[str]) -> float:
    """Mean loss of PyTorch's model on the eval examples, in float32."""
    section = load_recipe(recipe, changes).recipe
    plugin = builtin(section.plugin.module)
    ctx = Context(None, tokenizer(STAND_INS[recipe][1]), plugin.Options(**section.plugin.options), section, "train")
    lines = Path("eval.jsonl").read_text().splitlines()
    batch = {
        name: torch.tensor(array).long()
        for name, array in collate(plugin, ctx, [json.loads(x) for x in lines]).items()
    }
    labels = batch.pop("labels")
    model = transformers.AutoModelForCausalLM.from_pretrained("hub", torch_dtype=torch.float32)
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1]
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
    )


MESHES = ["{data: 1}", "{fsdp: 8}", "{data: 2, fsdp: 2, tensor: 2}"]


@pytest.mark.parametrize("recipe", STAND_INS)
def test_a_stand_in_is_valid(overrides, recipe: str) -> None:
    summary, sequences = validate(recipe, overrides(recipe))
    assert summary["steps"] == 2
    assert len(sequences) > 0
    for sequence in sequences:
        assert any(sequence.carries_loss)
        if STAND_INS[recipe][1] is not None:  # a conversation, of which the questions carry none
            assert not all(sequence.carries_loss)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=["one GPU", "eight GPUs", "slice"])
@pytest.mark.parametrize("recipe", STAND_INS)
def test_a_stand_in_is_trained_exported_and_read_by_pytorch(overrides, recipe: str, mesh: str) -> None:
    changes = [*overrides(recipe), f"mesh={mesh}"]
    result = train(recipe, changes)
    evaluations = dict(result.evaluations)
    assert evaluations[0]["loss"] == pytest.approx(reference_loss(recipe, changes), rel=1e-2)  # computed in bfloat16
    assert evaluations[2]["loss"] < evaluations[0]["loss"]
    assert result.step == 2
    exported = export("run", output="exported")
    assert exported is not None
    model = transformers.AutoModelForCausalLM.from_pretrained("exported", torch_dtype="auto")
    assert model.dtype == torch.bfloat16
    assert transformers.AutoTokenizer.from_pretrained("exported").chat_template == STAND_INS[recipe][1]
    lines = predict("run", ["model.dtype=float32"], output="answers.jsonl").read_text().splitlines()
    assert len(lines) == 11
