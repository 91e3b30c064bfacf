"""Every setting that a Flax class is allowed to have, with a value that changes PyTorch's logits or gradients."""

import pytest
from transformers import CONFIG_MAPPING

from redco_cli.errors import ModelError
from redco_cli.models.config.tasks import flax_class_names, supported_model_types
from redco_cli.models.flax.keys import is_proven, refuse_unproven
from redco_cli.models.flax.proven import COMPOSED, PROVEN
from redco_cli.models.flax.refusals import REFUSALS
from redco_cli.models.known_keys import is_read
from tests.models.flax.parity import (
    built,
    case_config,
    case_inputs,
    composed_config,
    faults,
    redco_run,
    save,
    torch_run,
    without_effect,
)
from tests.models.flax.tiny import where

CASES = [
    pytest.param(model_type, case, task, id=f"{model_type}-{number}-{task}")
    for model_type, cases in PROVEN.items()
    for number, case in enumerate(cases)
    for task in case.tasks or flax_class_names(case.inside or model_type)
]
PAIRS = [(kind, *pair) for kind, pairs in COMPOSED.items() for pair in pairs]


def shows_effects(kind, case, task):
    """Of the tasks of a case one; a decoder alone does not read what its encoder would."""
    tasks = list(case.tasks or flax_class_names(kind))
    return task == next((one for one in tasks if one != "causal_lm"), tasks[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "case", "task"), CASES)
def test_logits_gradients_and_what_is_trained_are_those_of_pytorch(model_type, case, task, tmp_path):
    kind = case.inside or model_type
    model = built(case_config(model_type, case, task), task, case)
    inputs = case_inputs(model, kind, task, case.length)
    expected = torch_run(model, inputs)
    save(model, tmp_path)
    assert faults(expected, redco_run(tmp_path, task, inputs, trains=case.trains)) == []
    if shows_effects(kind, case, task):
        assert without_effect(model, inputs, expected, model_type, case, task) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "first", "second"), PAIRS)
def test_parts_that_are_proven_together_are_those_of_pytorch(kind, first, second, tmp_path):
    """With an encoder that is wider than its decoder."""
    (task,) = flax_class_names(kind)
    model = built(composed_config(kind, first, second), task)
    inputs = case_inputs(model, kind, task, 8)
    expected = torch_run(model, inputs)
    save(model, tmp_path)
    assert faults(expected, redco_run(tmp_path, task, inputs)) == []


def with_setting(model_type, key, value):
    config = CONFIG_MAPPING[model_type]()
    setattr(config, key, value)
    return config


def test_every_flax_class_is_in_the_table():
    types = {name for name in supported_model_types() if flax_class_names(name)}
    parts = {part for pairs in COMPOSED.values() for pair in pairs for part in pair}
    assert types - set(PROVEN) - set(COMPOSED) == set()
    assert parts - set(PROVEN) == set()


def test_every_setting_of_the_table_is_one_that_pytorch_reads():
    shown = [(name, key) for name, cases in PROVEN.items() for case in cases for key in case.settings]
    assert [(name, key) for name, key in shown if not is_read(name, key)] == []


@pytest.mark.parametrize("model_type", sorted(set(PROVEN) - set(COMPOSED)))
def test_a_setting_is_followed_only_if_a_case_covers_it(model_type):
    """Each setting of the config class in turn, with another number, switch or text than by default."""
    covered = {key for case in PROVEN[model_type] for key in case.settings}
    usual = CONFIG_MAPPING[model_type]().to_dict()
    for key, value in usual.items():
        other = {bool: not value, str: f"{value}_"}.get(type(value), 7)
        assert is_proven(model_type, key, other, usual) <= (key in covered), key


@pytest.mark.parametrize(
    ("model_type", "key", "value", "remedy"),
    [
        ("bert", "hidden_act", "mish", "choose a model with another one: gelu_new, relu, silu"),
        ("bert", "tie_encoder_decoder", True, "choose a model without this setting"),
        ("whisper", "scale_embedding", True, "choose a model without this setting"),
        ("vit", "image_size", [16, 24], "choose a model without this setting"),
        ("vit", "hidden_size", {}, "choose a model without this setting"),
        ("t5", "d_ff", None, "choose a model without this setting"),
    ],
)
def test_what_no_case_covers_is_refused_by_name(model_type, key, value, remedy):
    with pytest.raises(ModelError) as caught:
        refuse_unproven(with_setting(model_type, key, value), "", lambda key: False, place=where)
    shown = {True: "true", None: "null"}.get(value) if value in (True, None) else value
    assert str(caught.value) == (
        f"recipe.yaml:3: {key}: {model_type} with {key}: {shown} is not supported: no test shows that its Flax class "
        f"computes it as PyTorch does\n  -> {remedy}"
    )


def test_what_refusals_decide_needs_no_case():
    decided = {(name, one.key) for one in REFUSALS for name in one.model_types if not one.tasks}
    shown = {(name, key) for name, cases in PROVEN.items() for case in cases for key in case.settings}
    assert shown & decided == set()
