"""Weights beside an adapter stay as narrow as they are kept, in what the compiler of a GPU makes of a step."""

import json
import math
import re

import pytest

from tests.chips.adapters import RESULTS, STEPS, fingerprint

FOUND = json.loads(RESULTS.read_text())
LAYERS, HIDDEN, KEYS, WIDE, VOCABULARY, RANK = 3, 512, 256, 1408, 4224, 8
WEIGHTS = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, KEYS), "v": (HIDDEN, KEYS), "o": (HIDDEN, HIDDEN)}
WEIGHTS |= {"gate": (HIDDEN, WIDE), "up": (HIDDEN, WIDE), "down": (WIDE, HIDDEN)}
NUMBERS = LAYERS * sum(map(math.prod, WEIGHTS.values()))
ADAPTER = LAYERS * RANK * sum(map(sum, WEIGHTS.values()))
TAKES = {"bfloat16": 2, "nf4": 0.5 + 4 / 64, "int8": 1 + 4 / 64}
"""Bytes of a number in a weight of a layer."""
CODES = {"u8", "s8", "u4", "s4"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "nf4, h100:1" else pytest.mark.slow) for name in STEPS]
)
def test_the_step_is_the_one_that_was_compiled(name):
    assert FOUND[name]["fingerprint"] == fingerprint(STEPS[name]), "run make test-chips, and commit adapters.json"


def arrays(text):
    """The type and the dims of each array in a text."""
    return [(kind, [int(dim) for dim in dims.split(",")]) for kind, dims in re.findall(r"(\w+)\[([\d,]+)\]", text)]


@pytest.mark.parametrize("name", STEPS)
def test_no_weight_is_written_in_float32_and_no_more_than_those_of_a_layer(name):
    for kind, dims in (one for shape in FOUND[name]["written"] for one in arrays(shape)):
        if kind in CODES:
            continue
        assert kind == "bf16"
        devices = STEPS[name].devices
        if devices > 1 and sorted(dims) in ([HIDDEN, VOCABULARY], [HIDDEN // devices, VOCABULARY]):
            continue  # embedding and head, gathered, and what one device has of the head
        assert not {LAYERS, LAYERS * HIDDEN, LAYERS * WIDE, VOCABULARY} & set(dims)
        assert math.prod(dims) < 2.1 * HIDDEN * WIDE  # gate and up, and their factors, are multiplied as one


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.devices == 1])
def test_a_step_is_given_the_weights_and_the_moments_of_the_adapter_alone(name):
    base = TAKES[name.partition(",")[0]] * NUMBERS + 2 * (2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN)
    factors_and_two_moments = 3 * 4 * ADAPTER
    batch = 3 * 2 * 640 * 4
    assert FOUND[name]["arguments"] == pytest.approx(base + factors_and_two_moments + batch, abs=64)


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.devices > 1])
def test_quantised_weights_are_gathered_as_they_are(name):
    gathered = [one for text in FOUND[name]["gathered"] for one in arrays(text)]
    assert CODES & {kind for kind, _ in gathered}
    assert all(RANK in dims or VOCABULARY in dims for kind, dims in gathered if kind == "bf16")
    assert all(math.prod(dims) * 64 <= HIDDEN * WIDE for kind, dims in gathered if kind == "f32")  # scales
