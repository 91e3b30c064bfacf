"""The picture of a plan: valid XML, areas and lines that follow the numbers, names that cannot break it."""

import dataclasses
import itertools
import re
from xml.etree import ElementTree

import pytest

from redco_cli.planning.parameter_groups import group_parameters
from redco_cli.planning.picture.blocks import blocks
from redco_cli.planning.picture.svg import render_svg
from tests.planning.plans import MESH, GiB, gpt2_rows, report_of, row, stacked_rows

TIMES = "\N{MULTIPLICATION SIGN}"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(rows, **changes):
    return ElementTree.fromstring(render_svg(report_of(rows, **changes)))


def tiles(root):
    """Full path to the parts of its rectangle: the whole, one device's share, lines, whether hatched."""
    found = {}
    for tile in root.iter(f"{SVG}g"):
        if tile.get("class") == "tile":
            whole, share, *rest = tile.findall(f"{SVG}rect")
            found[tile.find(f"{SVG}title").text.partition("\n")[0]] = (whole, share, tile.findall(f"{SVG}line"), rest)
    return found


def area(rect):
    return float(rect.get("width")) * float(rect.get("height"))


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("rows", [gpt2_rows(), stacked_rows(), [row("w", ())], []])
def test_every_parameter_is_there_once_and_inside_the_page(rows):
    root = drawn(rows)
    assert set(tiles(root)) == {group.path for group in group_parameters(rows, MESH)}
    _, _, width, height = map(float, root.get("viewBox").split())
    assert (root.get("width"), root.get("height")) == (f"{width:.0f}", f"{height:.0f}")
    for place in root.findall(f"{SVG}g"):
        x, y = map(float, re.findall(r"[\d.]+", place.get("transform")))
        assert 0 <= x < width
        assert 0 <= y < height


def test_areas_follow_bytes_and_the_strong_part_is_one_devices_share():
    found = tiles(drawn(gpt2_rows()))
    at = "params/transformer/h/{0..23}"
    width = 1024
    big = {
        f"{at}/mlp/c_fc/kernel": 4 * width,
        f"{at}/attn/c_attn/kernel": 3 * width,
        "params/transformer/wte/embedding": 50257,
    }
    reference = area(found[f"{at}/attn/c_proj/kernel"][0]) / width
    for path, rows in big.items():
        assert area(found[path][0]) == pytest.approx(rows * reference, rel=0.01), path
    assert area(found[f"{at}/mlp/c_fc/kernel"][1]) == pytest.approx(
        area(found[f"{at}/mlp/c_fc/kernel"][0]) / 8, rel=0.01
    )
    assert area(found[f"{at}/ln_{{1..2}}/scale"][1]) == pytest.approx(area(found[f"{at}/ln_{{1..2}}/scale"][0]))


def test_one_layer_of_a_stack_is_drawn():
    stacked, one = tiles(drawn(stacked_rows(32))), tiles(drawn(stacked_rows(1)))
    path = "params/decoder/layers/mlp/up/kernel"
    assert area(stacked[path][0]) == pytest.approx(area(one[path][0]), rel=0.01)
    unstacked = tiles(drawn([row("w", (4096, 14336), ["fsdp", "tensor"], dtype="bfloat16")]))["w"]
    ratio = [float(whole.get("width")) / float(whole.get("height")) for whole in (stacked[path][0], unstacked[0])]
    assert ratio[0] == pytest.approx(ratio[1], rel=0.01)
    assert f"4096/4 {TIMES} 14336/2  [fsdp, tensor]" in texts(drawn(stacked_rows(32)))


def test_lines_are_where_it_is_cut():
    found = tiles(drawn(gpt2_rows()))
    whole, share, lines, hatch = found["params/transformer/h/{0..23}/attn/c_attn/kernel"]
    across = [line for line in lines if line.get("x1") == line.get("x2")]
    assert (len(across), len(lines) - len(across)) == (1, 3)  # columns in 2, rows in 4
    assert float(across[0].get("x1")) == pytest.approx(float(whole.get("width")) / 2, abs=0.01)
    assert float(share.get("height")) == pytest.approx(float(whole.get("height")) / 4, abs=0.01)
    assert [one.get("fill") for one in hatch] == ["url(#also-fsdp)"]
    whole, _, lines, hatch = found["params/transformer/wpe/embedding"]
    assert (whole.get("class"), len(lines), hatch) == ("fsdp", 3, [])


def test_lines_never_become_a_smear():
    rows = [row("w", (4096, 4096), [None, "fsdp"], mesh={**MESH, "fsdp": 1024})]
    lines = tiles(drawn(rows, mesh={**MESH, "fsdp": 1024}))["w"][2]
    places = [float(line.get("x1")) for line in lines]
    assert 10 < len(places) < 100
    assert min(b - a for a, b in itertools.pairwise(places)) >= 2.99


def test_classes_say_the_kind_of_split():
    kinds = {
        path.rpartition("layers/")[2]: parts[0].get("class") for path, parts in tiles(drawn(stacked_rows())).items()
    }
    assert kinds["mlp/up/kernel"] == "columns"
    assert kinds["mlp/down/kernel"] == "rows"
    assert kinds["mlp_norm/scale"] == "replicated"
    assert kinds["params/head/kernel"] == "vocabulary"


def test_every_class_has_a_colour_in_the_legend_and_the_style():
    root = drawn(gpt2_rows())
    used = {one.get("class") for one in root.iter() if one.get("class")} - {"block", "tile", "memory"}
    style = root.find(f"{SVG}style").text
    assert used <= set(re.findall(r"\.([a-z]+)\{", style))
    kinds = {"replicated", "data", "fsdp", "columns", "rows", "vocabulary", "experts"}
    assert kinds <= used
    assert "@media (prefers-color-scheme:dark)" in style


def test_it_refers_to_nothing_outside():
    text = render_svg(report_of(gpt2_rows()))
    assert re.findall(r"\w+://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"url\((.*?)\)", text).count("#also-fsdp") == text.count("url(") > 0
    assert "<script" not in text
    assert "href" not in text


@pytest.mark.parametrize(
    "name", ["<script>&\"'", "a]]>b", "nul\x00esc\x1b", "\ud800", "\uffff", "naïve 模型", "x" * 500, "{a}", "{1..}"]
)
def test_any_name_is_text(name):
    rows = [row(f"layers/{layer}/{name}/w", (64, 64), reason=name) for layer in range(3)]
    text = render_svg(report_of(rows, model=name))
    root = ElementTree.fromstring(text.encode("utf-8"))
    expected = re.sub("[\x00\x1b\ud800\uffff]", "\N{REPLACEMENT CHARACTER}", name)
    assert expected in texts(root)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "style", "defs", "pattern", "path", "rect", "g", "text", "tspan", "line")
    }


def test_long_texts_are_cut():
    longest = max(map(len, texts(drawn([row(f"a/{'x' * 500}/w", (64, 64)), row("b/w", (64, 64))], model="m"))))
    assert longest < 120


# ---------------------------------------------------------------- blocks


def titles(rows):
    return [(block.title, block.repeats) for block in blocks(group_parameters(rows, MESH))]


def test_blocks_of_a_gpt2_stand_in_the_order_of_its_program():
    assert titles(gpt2_rows()) == [("input", 1), ("h/{0..23}", 24), ("after the layers", 1)]
    assert [label for label, _ in blocks(group_parameters(gpt2_rows(), MESH))[1].groups][:2] == [
        "attn/c_attn/bias",
        "attn/c_attn/kernel",
    ]


def test_blocks_of_a_stacked_decoder():
    assert titles(stacked_rows()) == [
        ("decoder: input", 1),
        ("decoder/layers", 32),
        ("decoder: after the layers", 1),
        ("output", 1),
    ]


def test_blocks_of_an_encoder_and_a_decoder():
    def side(name):
        layers = [row(f"{name}/block/{layer}/layer/0/SelfAttention/q/kernel", (8, 8)) for layer in range(4)]
        bias = row(f"{name}/block/0/layer/0/SelfAttention/relative_attention_bias/embedding", (32, 8))
        return [*layers, bias, row(f"{name}/final_layer_norm/weight", (8,))]

    rows = [*side("decoder"), *side("encoder"), row("lm_head/kernel", (8, 64)), row("shared/embedding", (64, 8))]
    assert titles(rows) == [
        ("input", 1),
        ("encoder/block/{0..3}", 4),
        ("encoder/block/0", 1),
        ("encoder: after the layers", 1),
        ("decoder/block/{0..3}", 4),
        ("decoder/block/0", 1),
        ("decoder: after the layers", 1),
        ("output", 1),
    ]


@pytest.mark.parametrize(
    ("numbers", "prefix", "copies"),
    [([0, 1, 2], "{0..2}", 3), ([1, 3, 5], "{1..5..2}", 3), ([0, 1, 7], "{0..1,7}", 3), ([4], "4", 1)],
)
def test_a_block_knows_how_often_it_is_there(numbers, prefix, copies):
    rows = [
        row("wte/embedding", (8, 8)),
        *(row(f"h/{number}/{name}/kernel", (8, 8)) for number in numbers for name in "ab"),
    ]
    assert titles(rows)[1] == (f"h/{prefix}", copies)


def test_layers_may_hold_their_parameters_directly():
    rows = [row("wte/embedding", (8, 8)), *(row(f"dense/{number}/kernel", (8, 8)) for number in range(4))]
    assert titles(rows) == [("input", 1), ("dense/{0..3}", 4)]


def test_two_norms_of_the_whole_model_are_no_layers():
    rows = [row("wte/embedding", (8, 8)), row("ln_1/scale", (8,)), row("ln_2/scale", (8,))]
    assert titles(rows) == [("input", 1), ("after the layers", 1)]


def test_a_repeated_block_says_how_often_and_has_sheets_behind_it():
    root = drawn(gpt2_rows())
    block = [group for group in root.findall(f"{SVG}g") if group.get("class") == "block"][1]
    assert texts(block)[0] == "h/{0..23} \N{MULTIPLICATION SIGN} 24"
    assert len([rect for rect in block.findall(f"{SVG}rect") if rect.get("class") == "panel"]) == 3
    assert "ln_{1..2}/scale \N{MULTIPLICATION SIGN} 2" in " ".join(texts(block))


# ---------------------------------------------------------------- memory


def memory_of(root):
    group = next(group for group in root.iter(f"{SVG}g") if group.get("class") == "memory")
    bar = [rect for rect in group.findall(f"{SVG}rect") if rect.get("height") == "30"]
    ends = [float(rect.get("x")) + float(rect.get("width")) for rect in bar[1:]]
    assert [float(rect.get("x")) for rect in bar[1:]] == pytest.approx([0, *ends[:-1]], abs=0.02)
    return {rect.get("class"): float(rect.get("width")) for rect in bar}, group.findall(f"{SVG}line"), texts(group)


def test_the_memory_bar_has_its_limit():
    report = report_of(gpt2_rows(), device_memory=4 * GiB)
    widths, limit, words = memory_of(ElementTree.fromstring(render_svg(report)))
    full = widths.pop("rest")
    assert set(widths) == {field.name for field in dataclasses.fields(report.memory)} - {"plugin_state"}
    assert widths["activations"] == pytest.approx(full * 1.5 / 4, abs=0.01)
    assert sum(widths.values()) == pytest.approx(full * report.memory.total / (4 * GiB), abs=0.05)
    assert float(limit[0].get("x1")) == pytest.approx(full, abs=1)
    assert "fits: 3.29 GiB of 4 GiB" in words


def test_what_does_not_fit_goes_beyond_the_limit():
    report = report_of(gpt2_rows(), device_memory=2 * GiB)
    widths, limit, words = memory_of(ElementTree.fromstring(render_svg(report)))
    full = widths.pop("rest")
    assert sum(widths.values()) == pytest.approx(full, abs=0.05)
    assert float(limit[0].get("x1")) == pytest.approx(full * 2 * GiB / report.memory.total, abs=0.01)
    assert "does not fit: 3.29 GiB of 2 GiB" in words


def test_without_a_limit_there_is_none():
    _, limit, words = memory_of(drawn(gpt2_rows()))
    assert limit == []
    assert "needs 3.29 GiB" in words
