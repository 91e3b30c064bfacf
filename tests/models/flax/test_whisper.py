"""What Whisper's decoder starts with: as PyTorch's class puts it together, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from redco_cli.errors import ModelError
from redco_cli.models.flax.whisper import Start, read_start

LANGUAGES = {"<|en|>": 50, "<|de|>": 51, "<|fr|>": 52}
MULTILINGUAL = {
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": {"translate": 53, "transcribe": 54},
    "no_timestamps_token_id": 63,
    "return_timestamps": False,
}
HEARD = 51
"""The language that a sound is taken for where none is given."""


def started(settings, config=None, **said):
    generation_config = GenerationConfig(decoder_start_token_id=2, **said)
    return read_start(SimpleNamespace(**(config or {})), generation_config, 2, settings, "here")


def in_pytorch(settings, config=None, **said):
    listener = SimpleNamespace(device="cpu", detect_language=lambda **_: torch.tensor([HEARD]))
    generation_config = GenerationConfig(decoder_start_token_id=2, **said)
    WhisperGenerationMixin._set_language_and_task(
        settings.get("language"), settings.get("task"), None, generation_config
    )
    config = SimpleNamespace(**({"forced_decoder_ids": None} | (config or {})))
    named = {"config": config, "num_segment_frames": 20, "kwargs": {}, "batch_size": 1}
    tokens = WhisperGenerationMixin._retrieve_init_tokens(listener, None, generation_config=generation_config, **named)
    return tokens[0].tolist()


@pytest.mark.parametrize(
    ("settings", "said", "config"),
    [
        ({}, {"return_timestamps": False}, {}),
        ({}, MULTILINGUAL, {}),
        ({"language": "german"}, MULTILINGUAL, {}),
        ({"language": "fr"}, MULTILINGUAL, {}),
        ({"language": "<|en|>", "task": "translate"}, MULTILINGUAL, {}),
        ({"task": "translate"}, MULTILINGUAL, {}),
        ({}, MULTILINGUAL | {"language": "en", "task": "transcribe"}, {}),
        ({}, MULTILINGUAL | {"forced_decoder_ids": [[1, None], [2, 54]]}, {}),
        ({}, MULTILINGUAL, {"forced_decoder_ids": [[1, 52], [2, 53], [3, 63]]}),
        ({}, {"forced_decoder_ids": [[1, 63]], "no_timestamps_token_id": 63, "return_timestamps": False}, {}),
    ],
)
def test_it_starts_as_in_pytorch(settings, said, config):
    tokens = started(settings, config, **said).tokens
    assert [HEARD if token == -1 else token for token in tokens] == in_pytorch(settings, config, **said)


def test_the_language_is_the_likeliest_that_the_decoder_knows():
    logits = torch.zeros(2, 1, 64).numpy()
    logits[0, 0, 52], logits[1, 0, 51], logits[:, 0, 60] = 1, 1, 5
    flax = SimpleNamespace(decode=lambda *_, **__: SimpleNamespace(logits=logits))
    ids = Start((2, -1, 63), (50, 51, 52)).ids(flax, {}, torch.zeros(2, 3, 4).numpy())
    assert ids.tolist() == [[2, 52, 63], [2, 51, 63]]


@pytest.mark.parametrize(
    ("settings", "said", "message"),
    [
        (
            {"language": "klingon"},
            MULTILINGUAL,
            "here: the model knows no language 'klingon'\n  -> known: en, de, fr",
        ),
        (
            {"task": "sing"},
            MULTILINGUAL,
            "here: the model knows no task 'sing'\n  -> known: translate, transcribe",
        ),
        (
            {"language": "en"},
            {"is_multilingual": False},
            "here: this Whisper is English only, and takes no language\n"
            "  -> leave it out, or set is_multilingual: true in generation_config.json",
        ),
        (
            {},
            {"return_timestamps": True},
            "here: the generation setting return_timestamps: True is not honoured here\n"
            "  -> remove it from generation_config.json",
        ),
        (
            {},
            {"forced_decoder_ids": [[1, 50], [3, 63]]},
            "here: the generation setting forced_decoder_ids: [[1, 50], [3, 63]] leaves places out\n"
            "  -> name the tokens of the places 1, 2, ..., or remove it",
        ),
    ],
)
def test_refuses_what_is_not_followed(settings, said, message):
    with pytest.raises(ModelError) as caught:
        started(settings, **said)
    assert str(caught.value) == message
