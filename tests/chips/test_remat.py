"""What is recomputed of a compiled step: attention as often as it is said, and the memory that was to be saved."""

import json
from typing import get_args

import pytest

from redco_cli.models.decoder.block import Remat
from tests.chips.programs import RECOMPUTED, RESULTS, fingerprint

FOUND = json.loads(RESULTS.read_text())


def on_gpus(remat):
    return FOUND[f"llama, remat {remat}, h100:8"]


@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_program_is_the_one_that_was_compiled(name):
    assert FOUND[name]["fingerprint"] == fingerprint(RECOMPUTED[name]), "run make test-chips, and commit results.json"


def test_the_less_is_kept_the_less_memory_it_takes():
    needed = [on_gpus(remat)["memory"] for remat in ("none", "dots", "attention", "full", "offload")]
    assert needed == sorted(needed, reverse=True)
    assert needed[1] < 0.8 * needed[0]
    assert needed[2] < 0.5 * needed[1]


@pytest.mark.parametrize("remat", sorted({*get_args(Remat)} - {"none"}))  # of which XLA recomputes some by itself
def test_memory_is_as_predicted(remat):
    assert on_gpus(remat)["predicted_memory"] == pytest.approx(on_gpus(remat)["memory"], rel=0.1)


def test_layer_inputs_queries_keys_and_values_wait_on_the_host():
    layers, tokens, width = 4, 64 * 1024 // 8, 512
    for name, found in FOUND.items():
        if name in RECOMPUTED:
            assert found["host"] == (layers * 4 * tokens * width * 2 if "offload" in name else 0), name
