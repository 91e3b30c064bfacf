"""`known_keys.json` against transformers: what tiny models ask their configs for, and what the sources load."""

import pytest

from redco_cli.models import known_keys
from redco_cli.models.families.registry import families
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings
from redco_cli.models.hf_config import decoder_config
from tests.models.config import reads
from tests.models.decoder.pairs import hf_config, where


@pytest.mark.slow
def test_the_table_is_what_transformers_reads():
    """If not: `python -m tests.models.config.reads` writes it anew; look at what has changed."""
    assert known_keys.FILE.read_text(encoding="utf-8") == reads.written(reads.table())


@pytest.mark.slow
def test_recording_and_sources_agree_on_llama():
    recorded, static = reads.recorded_reads(["llama"])["llama"], reads.static_reads(type(hf_config("llama")))
    assert {"hidden_act", "mlp_bias", "rope_theta"} <= recorded & static


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(families().keys() - {"falcon"}))
def test_dropout_of_attention_is_honoured_where_it_is_read(name):
    """The check for fused attention asks every model for it, so that it passes as immaterial where nobody reads it.

    Falcon's is refused, which tests of families show.
    """
    config = hf_config(name)
    config.attention_dropout = 0.25
    read = "attention_dropout" in reads.static_reads(type(config))
    assert (decoder_config(config, where=where).attention_dropout == 0.25) == read


def test_a_setting_that_does_not_matter_is_one_that_is_read():
    """What nobody reads is a warning, and needs no mention by a family."""
    unread = {
        name: {key for key in family.irrelevant if not known_keys.is_read(name, key)}
        for name, family in families().items()
    }
    assert {name: keys for name, keys in unread.items() if keys} == {}


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {"short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]},
}
OTHER = {"mscale": {"mscale_all_dim": 0.5}, "mscale_all_dim": {"mscale": 1.0}, "original_max_position_embeddings": {}}
"""What else must be there for a key to matter."""


def rope(scaling):
    config = hf_config("llama")
    config.rope_scaling = scaling
    return read_rope(Settings(config, where), head_dim=4)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in ROPES for key in sorted(known_keys.rope_keys(kind))])
def test_every_key_that_a_kind_of_scaling_reads_is_honoured(kind, key):
    scaling = {"rope_type": kind, **ROPES[kind], **OTHER.get(key, {})}
    value = {"short_factor": [3.0, 2.0], "long_factor": [3.0, 2.0], "truncate": False}.get(key, 3)
    assert rope({**scaling, key: value}) != rope(scaling)


def test_a_type_that_the_table_does_not_know_is_read_strictly():
    assert known_keys.is_read("a_new_family", "anything")
