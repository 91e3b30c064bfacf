"""The byte tokenizer, and which tokenizer a recipe gets."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redco_cli.errors import DataError, ModelError
from redco_cli.models.config.byte_tokenizer import BOS, EOS, PAD, SEP, VOCAB_SIZE, ByteTokenizer
from redco_cli.models.config.tokenizer import load_tokenizer
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import CONFIGS, config_for, where

LLAMA = config_for("llama", "causal_lm", vocab_size=260)


@pytest.mark.slow
@given(st.text())
def test_every_text_comes_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < PAD for token in ids)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_every_row_of_ids_is_some_text(ids):
    tokenizer = ByteTokenizer()
    expected = bytes(token for token in ids if token < PAD).decode("utf-8", errors="replace")
    assert tokenizer.decode(np.array(ids, int)) == expected


@given(st.lists(st.text(max_size=5), min_size=1), st.sampled_from(["left", "right"]))
def test_padding_hides_nothing(texts, side):
    tokenizer = ByteTokenizer()
    tokenizer.padding_side = side
    batch = tokenizer(texts, padding=True, return_tensors="np")
    assert batch.input_ids.shape == batch.attention_mask.shape == (len(texts), max(len(t.encode()) for t in texts))
    assert batch.input_ids.dtype == np.int32
    rows = [row[mask == 1] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert tokenizer.batch_decode(rows) == tokenizer.batch_decode(batch.input_ids) == texts


def test_calls_like_a_hugging_face_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer("ab") == {"input_ids": [97, 98], "attention_mask": [1, 1]}
    assert tokenizer(text_target=["a", "bc"])["input_ids"] == [[97], [98, 99]]
    assert tokenizer("abc", max_length=2, truncation=True).input_ids == [97, 98]
    assert tokenizer(["a"], padding="max_length", max_length=3)["input_ids"] == [[97, PAD, PAD]]
    assert tokenizer("a", "b").input_ids == [97, SEP, 98]
    assert tokenizer.decode([BOS, 97, EOS], skip_special_tokens=False) == "<bos>a<eos>"
    assert len(tokenizer) == tokenizer.vocab_size == 260
    with pytest.raises(ValueError, match="300 is no token: ids go from 0 to 259"):
        tokenizer.decode([300])


def test_letters_never_become_special_tokens():
    assert EOS not in ByteTokenizer().encode("a<eos>")


def test_conversations_end_each_message():
    tokenizer = ByteTokenizer()
    question = [{"role": "user", "content": "2+2?"}]
    full = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": "4"}])
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert full[: len(prompt)] == prompt
    assert full[len(prompt) :] == [ord("4"), EOS]
    assert tokenizer.apply_chat_template(question, tokenize=False) == "user: 2+2?<eos>"


def test_a_recipe_without_a_name_has_the_tokenizer_it_says_or_none():
    assert load_tokenizer(ModelSection(config=LLAMA), where=where) is None
    assert load_tokenizer(ModelSection(), where=where) is None
    assert isinstance(load_tokenizer(ModelSection(tokenizer="byte"), where=where), ByteTokenizer)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"vocab_size": 256},
            "vocab_size: the tokenizer has 260 ids, but the model's vocab_size is 256\n  -> set vocab_size: 260",
        ),
        (
            {"eos_token_id": 2},
            "eos_token_id: 2 in the model's config, but the tokenizer's eos_token_id is 258\n"
            "  -> set eos_token_id: 258",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(changed, message):
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSection(config=LLAMA | changed, tokenizer="byte"), where=where)
    assert str(caught.value) == f"recipe.yaml:3: model.config.{message}"


def test_a_named_model_brings_its_own(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = CONFIGS["gpt2"] | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = ModelSection(name=str(tmp_path))
    assert load_tokenizer(section, where=where) is None

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(section, where=where)("b a")["input_ids"] == [1, 0]

    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2}))
    with pytest.raises(ModelError) as caught:
        load_tokenizer(section, where=where)
    assert str(caught.value) == (
        "recipe.yaml:3: model.tokenizer: the tokenizer has 3 ids, but the model's vocab_size is 2\n"
        "  -> take the model's own tokenizer"
    )


def test_a_model_of_images_and_text_brings_what_prepares_both(tmp_path):
    """Saved as `nlpconnect/vit-gpt2-image-captioning` is: no file names a class that holds both."""
    config = {**CONFIGS["vision-encoder-decoder"], "model_type": "vision-encoder-decoder"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["VisionEncoderDecoderModel"]}))
    section = ModelSection(name=_words(tmp_path))
    assert load_tokenizer(section, where=where)("b a")["input_ids"] == [1, 0]

    images = {"feature_extractor_type": "ViTFeatureExtractor", "size": 16, "image_mean": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images | {"image_std": [0.5] * 3}))
    found = load_tokenizer(section, where=where)
    assert found.tokenizer("b a")["input_ids"] == [1, 0]
    white = np.full((32, 20, 3), 255, np.uint8)
    assert found.image_processor(images=[white], return_tensors="np")["pixel_values"].tolist() == [
        np.ones((3, 16, 16)).tolist()
    ]

    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"recipe.yaml:3: model.name: Auto(Image)?Processor cannot load "):
        load_tokenizer(section, where=where)


def test_tokenizers_that_are_not_there_are_named():
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSection(tokenizer="./nowhere"), where=where)
    assert str(caught.value) == "recipe.yaml:3: model.tokenizer: there is no directory ./nowhere\n  -> check the path"
    with pytest.raises(ModelError, match="AutoTokenizer cannot load some/tokenizer: ") as caught:
        load_tokenizer(ModelSection(tokenizer="some/tokenizer"), where=where)
    assert str(caught.value).endswith(
        "\n  -> check the name and the network, or set model.tokenizer to a hub id, a directory, or byte"
    )


def _words(directory, template="{{ messages[0]['content'] }}"):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (directory / "chat_template.jinja").write_text(template)
    return str(directory)


def test_the_chat_template_of_a_recipe_comes_before_the_own_one(tmp_path):
    import transformers

    name, messages = _words(tmp_path), [{"role": "user", "content": "a"}]
    own = load_tokenizer(ModelSection(tokenizer=name), where=where)
    other = load_tokenizer(ModelSection(tokenizer=name, chat_template="b{{ messages[0]['content'] }}"), where=where)
    assert own.apply_chat_template(messages, tokenize=False) == "a"
    assert other.apply_chat_template(messages, tokenize=False) == "ba"
    other.save_pretrained(tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.apply_chat_template(messages, tokenize=False) == "ba"


@pytest.mark.parametrize(
    ("template", "tokenizer", "said"),
    [
        ("{% for x in y %}\n{{ x }", None, "is no Jinja template: line 2: "),
        ("{{ x | nothing }}", None, "is no Jinja template: line 1: No filter named 'nothing'."),
        ("{{ messages }}", "byte", "given, but the tokenizer takes none\n  -> leave it out, or name a tokenizer of"),
        ("{{ messages }}", "", "given, but there is no tokenizer\n  -> leave it out, or name a tokenizer of"),
    ],
)
def test_a_template_that_cannot_be_is_refused_at_once(tmp_path, template, tokenizer, said):
    name = {None: _words(tmp_path), "": None}.get(tokenizer, tokenizer)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSection(tokenizer=name, chat_template=template), where=where)
    assert str(caught.value).startswith(f"recipe.yaml:3: model.chat_template: {said}")


def test_the_template_of_a_recipe_has_limits_too(tmp_path):
    section = ModelSection(tokenizer=_words(tmp_path), chat_template="{{ 'a' * 10 ** 10 }}")
    tokenizer = load_tokenizer(section, where=where)
    with pytest.raises(DataError, match=r"recipe\.yaml:3: model\.chat_template: the chat template of model\.chat_tem"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
