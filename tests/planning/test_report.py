"""What a plan says as data: groups of parameters, figures, and a document that fits its schema."""

import dataclasses
import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redco_cli.planning.parameter_groups import group_parameters
from redco_cli.planning.report import Compiled, as_json, report_schema
from redco_cli.planning.search.remedies import does_fit
from tests.planning.plans import (
    COLLECTIVES,
    COMPILED,
    MESH,
    RUNNERS_UP,
    GiB,
    gpt2_rows,
    plan_of,
    report_of,
    row,
    stacked_rows,
)


def unfolded(pattern):
    """Every path that a folded path stands for, as a shell would expand it."""
    pieces = re.split(r"\{(.*?)\}", pattern)
    choices = [[piece] for piece in pieces]
    for place in range(1, len(pieces), 2):
        choices[place] = []
        for run in pieces[place].split(","):
            ends = [int(number) for number in run.split("..")]
            step = ends[2] if len(ends) == 3 else 1
            choices[place] += [str(number) for number in range(ends[0], ends[min(1, len(ends) - 1)] + 1, step)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def patterns(rows, **options):
    return [group.path for group in group_parameters(rows, MESH, **options)]


# ---------------------------------------------------------------- folding


def test_a_gpt2_of_24_layers_is_fourteen_groups():
    groups = group_parameters(gpt2_rows(layers=24), MESH)
    assert [(group.path.removeprefix("params/transformer/"), group.count) for group in groups] == [
        ("h/{0..23}/attn/c_attn/bias", 24),
        ("h/{0..23}/attn/c_attn/kernel", 24),
        ("h/{0..23}/attn/c_proj/bias", 24),
        ("h/{0..23}/attn/c_proj/kernel", 24),
        ("h/{0..23}/ln_{1..2}/bias", 48),
        ("h/{0..23}/ln_{1..2}/scale", 48),
        ("h/{0..23}/mlp/c_fc/bias", 24),
        ("h/{0..23}/mlp/c_fc/kernel", 24),
        ("h/{0..23}/mlp/c_proj/bias", 24),
        ("h/{0..23}/mlp/c_proj/kernel", 24),
        ("ln_f/bias", 1),
        ("ln_f/scale", 1),
        ("wpe/embedding", 1),
        ("wte/embedding", 1),
    ]


def test_a_group_says_all_of_its_parameters():
    group = group_parameters(gpt2_rows(layers=24), MESH)[1]
    assert dataclasses.asdict(group) == {
        "path": "params/transformer/h/{0..23}/attn/c_attn/kernel",
        "count": 24,
        "shape": (1024, 3072),
        "layers": 0,
        "dtype": "float32",
        "spec": (("fsdp",), ("tensor",)),
        "gathered": ((), ("tensor",)),
        "parts": (4, 2),
        "split": "columns",
        "reason": "columns: makes 16 heads, 8 on each device",
        "bytes": 24 * 1024 * 3072 * 4,
        "bytes_per_device": 24 * 1024 * 3072 * 4 // 8,
    }


@pytest.mark.parametrize("rows", [gpt2_rows(), stacked_rows()])
def test_nothing_is_lost_or_counted_twice(rows):
    groups, plan = group_parameters(rows, MESH), plan_of(rows)
    assert sum(group.count for group in groups) == len(rows)
    assert sum(group.bytes for group in groups) == plan.bytes
    assert sum(group.bytes_per_device for group in groups) == plan.bytes_per_device
    assert sorted(path for group in groups for path in unfolded(group.path)) == sorted(one.path for one in rows)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (8, 8)},
        {"spec": ["tensor"]},
        {"reason": "other"},
        {"dtype": "bfloat16"},
    ],
)
def test_what_differs_is_another_group(change):
    rows = [row(f"h/{layer}/w", (8,)) for layer in range(6)]
    rows[3] = row("h/3/w", **{"shape": (8,), **change})
    assert patterns(rows) == ["h/{0..2,4..5}/w", "h/3/w"]


def test_numbers_of_two_levels_fold_only_where_every_pair_is_there():
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    rows = [row(f"block/{a}/layer/{b}/w", (8,)) for a, b in pairs]
    assert patterns(rows) == ["block/{0..1}/layer/{0..1}/w", "block/2/layer/0/w"]


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        ([5], "x5"),
        ([0, 1], "x{0..1}"),
        ([0, 2], "x{0,2}"),
        ([1, 3, 5, 7], "x{1..7..2}"),
        ([0, 1, 2, 8, 10, 11], "x{0..2,8,10..11}"),
        ([11, 9, 10], "x{9..11}"),
    ],
)
def test_how_numbers_are_written(numbers, pattern):
    assert patterns([row(f"x{number}", (8,)) for number in numbers]) == [pattern]


def test_a_number_with_a_leading_zero_is_part_of_the_name():
    assert patterns([row("h_00", (8,)), row("h_01", (8,))]) == ["h_00", "h_01"]


def test_signs_in_names_are_no_numbers():
    rows = [row(path, (8,)) for path in ("a#/w", "a1/w", "a2/w", "{x}/w", "a#2/w", "a2#/w")]
    assert patterns(rows) == ["a#/w", "a{1..2}/w", "{x}/w", "a#2/w", "a2#/w"]


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40))
def test_any_set_of_numbered_paths_unfolds_to_itself(numbers):
    rows = [row(f"a/{a}/b_{b}/c{c}", (8,)) for a, b, c in numbers]
    groups = group_parameters(rows, MESH)
    assert sorted(path for group in groups for path in unfolded(group.path)) == sorted(one.path for one in rows)
    assert [group.count for group in groups] == [len(unfolded(group.path)) for group in groups]


# ---------------------------------------------------------------- stacks of layers


def layers_by_path(rows, **options):
    return {group.path: group.layers for group in group_parameters(rows, MESH, **options)}


def test_stacked_layers_are_seen_in_their_common_leading_dim():
    layers = layers_by_path(stacked_rows(layers=32))
    assert {path for path, count in layers.items() if count == 32} == {
        path for path in layers if path.startswith("params/decoder/layers/")
    }
    assert set(layers.values()) == {0, 32}
    assert len([count for count in layers.values() if count]) == 9


def test_a_wide_layer_is_no_stack():
    assert set(layers_by_path(gpt2_rows()).values()) == {0}


def test_experts_of_one_layer_are_no_stack():
    rows = [
        row(f"moe/{name}", shape) for name, shape in [("up", (8, 64, 256)), ("down", (8, 256, 64)), ("bias", (8, 64))]
    ]
    assert set(layers_by_path(rows).values()) == {0}


def test_a_stack_is_never_split_over_its_layers():
    rows = [dataclasses.replace(one, spec=one.gathered) for one in stacked_rows()]
    assert 32 in layers_by_path(rows).values()
    split = [row("a/b/x", (8, 64, 64), ["fsdp"]), *(row(f"a/b/{name}", (8, 64)) for name in "pqrst")]
    assert set(layers_by_path(split).values()) == {0}


def test_who_knows_the_stacks_says_so():
    rows = [row("a/w", (4, 8, 8)), row("a/b", (4, 8))]
    assert layers_by_path(rows) == {"a/w": 0, "a/b": 0}
    assert layers_by_path(rows, stacked={"a/w": 1, "a/b": 1}) == {"a/w": 4, "a/b": 4}
    assert set(layers_by_path(stacked_rows(), stacked={}).values()) == {0}


# ---------------------------------------------------------------- kinds of splits


@pytest.mark.parametrize(
    ("shape", "spec", "reason", "split"),
    [
        ((8, 8), [], "", "replicated"),
        ((8, 8), ["data"], "", "data"),
        ((8, 8), [None, "fsdp"], "", "fsdp"),
        ((8, 8), [("data", "fsdp")], "", "fsdp"),
        ((8, 8), ["fsdp", "tensor"], "", "columns"),
        ((8, 8), ["tensor", "fsdp"], "", "rows"),
        ((8,), ["tensor"], "", "columns"),
        ((8, 4, 2), ["fsdp", "tensor"], "", "columns"),
        ((4, 2, 8), ["tensor", None, "fsdp"], "", "rows"),
        ((8, 8), ["tensor"], "columns: makes 8 features, 4 on each device", "columns"),
        ((8, 8), [None, "tensor"], "rows: sums over 8 features, 4 on each device", "rows"),
        ((24, 8), ["tensor"], "3 projections of 8 heads in one: contiguous blocks, moved where cut", "columns"),
        ((8, 8), ["tensor"], "table: 8 rows, 4 on each device", "vocabulary"),
        ((8, 8), ["tensor"], "columns and rows: sums over 8 rows, 4 on each device", "vocabulary"),
        ((8, 8), [None, "tensor"], "columns: makes 8 rows, 4 on each device", "vocabulary"),
        ((4, 8, 8), ["tensor"], "4 experts, 2 on each device", "experts"),
    ],
)
def test_kinds_of_splits(shape, spec, reason, split):
    assert [group.split for group in group_parameters([row("w", shape, spec, reason)], MESH)] == [split]


def test_what_is_gathered_for_use_is_not_split_over_tensor():
    stored = row("w", (8, 8), ["tensor"], "table that is only looked up; stored in shards, gathered where used")
    whole = dataclasses.replace(stored, gathered=type(stored.gathered)())
    assert [group.split for group in group_parameters([whole], MESH)] == ["fsdp"]


def test_the_layer_dim_does_not_make_columns_rows():
    splits = {group.path.split("layers/")[-1]: group.split for group in group_parameters(stacked_rows(), MESH)}
    assert splits["attention/output/kernel"] == splits["mlp/down/kernel"] == "rows"
    assert splits["attention/query/kernel"] == splits["mlp/up/kernel"] == "columns"
    assert splits["params/head/kernel"] == splits["params/decoder/embed/embedding"] == "vocabulary"
    without = [dataclasses.replace(one, reason="") for one in stacked_rows()]
    splits = {group.path.split("layers/")[-1]: group.split for group in group_parameters(without, MESH)}
    assert (splits["mlp/down/kernel"], splits["mlp/up/kernel"]) == ("rows", "columns")


# ---------------------------------------------------------------- the report


def test_the_figures_of_a_report():
    report = report_of(gpt2_rows(), device_memory=4 * GiB)
    assert report.parameters == 354_823_168
    assert report.bytes == 4 * 354_823_168
    assert report.devices == 8
    assert report.memory.parameters == sum(group.bytes_per_device for group in report.groups)
    sent = [3 * COLLECTIVES[0].bytes // 4, COLLECTIVES[1].bytes, 3 * COLLECTIVES[2].bytes]
    assert [one.bytes for one in report.collectives] == sent  # in rings of four and two devices
    assert [(one.kind, one.count) for one in report.collectives] == [(one.kind, one.count) for one in COLLECTIVES]


AS_COMPILED = Compiled(800, (), 1.0, None, 0, (), 0, (), None, None)


@pytest.mark.parametrize(
    ("compiled", "limit", "fits"),
    [
        (None, None, None),
        (None, 700, True),
        (None, 699, False),
        ({"target": "h100:8"}, None, None),
        ({"target": "h100:8"}, 800, True),
        ({"target": "h100:8"}, 799, False),  # whatever the plan says
        ({"target": "v6e:2x4", "memory": None, "too_large": "48 GiB of 31.25"}, 9000, False),
        ({"target": "v6e:2x4", "memory": None}, 700, True),
        ({}, 700, True),  # for simulated CPUs, which keep other arrays
    ],
)
def test_whether_it_fits(compiled, limit, fits):
    made = None if compiled is None else dataclasses.replace(AS_COMPILED, **compiled)
    assert does_fit(700, made, limit) is fits


def full_document():
    report = report_of(
        gpt2_rows(),
        warnings=["look"],
        device_memory=2 * GiB,
        runners_up=RUNNERS_UP,
        remedies=["--batch-size 32"],
        compiled=COMPILED,
    )
    return as_json(report)


@pytest.mark.parametrize("document", [full_document(), as_json(report_of(stacked_rows(), seq_length=None))])
def test_the_document_is_plain_json_and_fits_the_schema(document):
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    schema = report_schema()
    check(document, schema, schema["$defs"])


def check(value, schema, definitions):
    """As a JSON Schema validator would, for what this schema uses; unknown words fail."""
    schema = {key: part for key, part in schema.items() if key not in ("title", "description", "$defs")}
    if "$ref" in schema:
        return check(value, definitions[schema["$ref"].rpartition("/")[2]], definitions)
    kind = {"object": dict, "array": list, "integer": int, "number": float, "string": str, "null": type(None)}
    kind["boolean"] = bool
    if "anyOf" in schema:
        kinds = [part for part in schema["anyOf"] if kind.get(part.get("type"), dict) is type(value)]
        return check(value, kinds[0], definitions)
    if "enum" in schema:
        assert value in schema["enum"]
    assert type(value) is kind[schema.pop("type")]
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"], definitions)
    elif isinstance(value, dict) and "properties" in schema:
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) == set(schema["properties"]) == set(value)
        for name, item in value.items():
            check(item, schema["properties"][name], definitions)
    elif isinstance(value, dict):
        for item in value.values():
            check(item, schema["additionalProperties"], definitions)
    assert set(schema) <= {"items", "properties", "required", "additionalProperties", "enum"}
    return None


def test_the_document_says_what_the_report_does():
    document = full_document()
    assert document["chosen"]["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    assert document["groups"][1]["spec"] == [["fsdp"], ["tensor"]]
    assert math.isclose(document["compiled"]["seconds"], 7.25)
    assert document["fits"] is False
    assert [choice["reason"] for choice in document["runners_up"]] == ["more traffic", "does not fit"]


def test_everything_in_the_schema_is_described():
    schema = report_schema()
    parts = {"Report": schema, **schema["$defs"]}
    of_speed = {"Speed", "Term", "Constant", "Comparison", "Difference"}
    plain = {"Report", "Choice", "Compiled", "ParameterGroup", "Memory", "Collective", "Written"}
    assert set(parts) == plain | of_speed
    bare = [
        f"{name}.{key}"
        for name, part in parts.items()
        for key, value in part["properties"].items()
        if not value.get("description", "").endswith(".")
    ]
    assert bare == []
    assert parts["Collective"]["properties"]["bytes"]["description"].startswith("result bytes on one device")
    assert parts["ParameterGroup"]["properties"]["split"]["description"].endswith("whole on every device.")
