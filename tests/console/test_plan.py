"""A report as it is drawn: whole texts without a terminal, the essentials with one."""

import dataclasses
import io
import re

import pytest

from redco_cli.console import open_console
from redco_cli.console.plan import mesh_text, show_plan, sizes_text, spec_text
from redco_cli.planning.report import Choice, Memory, as_json
from redco_cli.sharding.compiled.schedule import Written
from tests.planning.plans import COMPILED, MESH, RUNNERS_UP, GiB, gpt2_rows, report_of, row, stacked_rows

TIMES = "\N{MULTIPLICATION SIGN}"


def plain(report):
    console = open_console(io.StringIO(), terminal=False)
    show_plan(as_json(report), console)
    return console.file.getvalue()


@pytest.fixture
def on_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def draw(report, width):
        console = open_console(io.StringIO(), terminal=True)
        console.width = width
        show_plan(as_json(report), console)
        return console.file.getvalue()

    return draw


def seen(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def small(**changes):
    """Two layers and an embedding."""
    rows = [
        *(row(f"h/{n}/fc/kernel", (8, 32), ["fsdp", "tensor"], "columns: makes 32 features") for n in range(2)),
        *(row(f"h/{n}/norm/scale", (8,)) for n in range(2)),
        row("wte/embedding", (101, 8), [None, "fsdp"], "no axis of its own that divides"),
    ]
    memory = Memory(1000, 1000, 2000, 4096, 2048, 96, 0, 0)
    chosen = Choice(MESH, "none", 4, memory.total, 1536, "least traffic")
    given = {"memory": memory, "chosen": chosen, "seq_length": 16, "model": "tiny", **changes}
    return dataclasses.replace(report_of(rows, **given), collectives=())


HEADING = """\
tiny: 1,336 parameters, 5.22 KiB, on 8 devices
mesh: data=1,fsdp=4,tensor=2 (least traffic)
step: 64 examples of 16 tokens, micro-batch 4, remat none, computed in float32

parameters           count  shape/parts  split over      per device  why
h/{0..1}/fc/kernel       2  8/4 * 32/2   [fsdp, tensor]       256 B  columns: makes 32 features
h/{0..1}/norm/scale      2  8            [-]                   64 B  vector of the residual stream
wte/embedding            1  101 * 8/4    [-, fsdp]            808 B  no axis of its own that divides

""".replace(" * ", f" {TIMES} ")


def test_everything_without_a_terminal():
    expected = (
        HEADING
        + """\
memory on one device     bytes
parameters              1000 B  ###
gradients               1000 B  ###
optimizer state       1.95 KiB  ######
activations              4 KiB  ############
logits                   2 KiB  ######
batch                     96 B
gathered parameters        0 B
total                   10 KiB  ##############################

collectives in a step: none

needs: 10 KiB per device; with --device-memory, such as 80GiB, what is left open is chosen to fit
"""
    )
    assert plain(small()) == expected


def test_collectives_compiled_runners_up_and_warnings_without_a_terminal():
    report = report_of(
        gpt2_rows(),
        device_memory=32 * GiB,
        runners_up=RUNNERS_UP,
        compiled=COMPILED,
        warnings=["look\nhere"],
    )
    tail = plain(report).partition("device memory ")[2].partition("\n\n")[2]
    assert (
        tail
        == """\
collectives in a step  mesh axis  count  bytes per device  what
all-gather             fsdp          96          1008 MiB  weights of h, where they are used
all-reduce             tensor        96           768 MiB  activations after attn/c_proj and mlp/c_proj
reduce-scatter         fsdp         148           508 MiB  gradients
total                                            2.23 GiB

compiled in 7.2s   mesh axis  predicted  compiled
all-gather         fsdp        1008 MiB  1001 MiB
all-reduce         tensor       768 MiB   768 MiB
reduce-scatter     fsdp         508 MiB       0 B
all-reduce         fsdp             0 B      96 B
total                          2.23 GiB  1.73 GiB
memory per device              3.29 GiB   3.5 GiB

mesh                             remat  micro-batch    memory   traffic  why
data=1,fsdp=4,tensor=2 (chosen)  full             8  3.29 GiB  2.23 GiB  least traffic of the meshes that fit
data=1,fsdp=8,tensor=1           full             8   3.3 GiB     4 GiB  more traffic
data=8,fsdp=1,tensor=1           none            16    12 GiB  1.32 GiB  does not fit

warning: look here
fits: 3.29 GiB of 32 GiB per device
"""
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"device_memory": 16 * 1024}, "fits: 10 KiB of 16 KiB per device"),
        ({"device_memory": 8 * 1024}, "does not fit: 10 KiB of 8 KiB per device"),
        (
            {"device_memory": 8 * 1024, "remedies": ["--mesh fsdp=8", "--batch-size 32"]},
            "does not fit: 10 KiB of 8 KiB per device\n  -> --mesh fsdp=8\n  -> --batch-size 32",
        ),
    ],
)
def test_the_last_line_says_whether_it_fits(changes, line):
    assert plain(small(**changes)).endswith(f"\n\n{line}\n")


def test_the_last_line_says_what_the_compiler_needs_where_it_knows_the_devices():
    compiled = dataclasses.replace(COMPILED, target="h100:8", memory=12 * 1024)
    text = plain(small(device_memory=11 * 1024, compiled=compiled))
    assert text.endswith("\n\ndoes not fit: 12 KiB of 11 KiB per device as compiled, 10 KiB by plan\n")
    simulated = dataclasses.replace(compiled, target=None)
    assert plain(small(device_memory=11 * 1024, compiled=simulated)).endswith("\n\nfits: 10 KiB of 11 KiB per device\n")


def test_one_device_and_examples_without_tokens():
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    chosen = Choice(mesh, "none", 4, 0, 0, "")
    text = plain(report_of([row("w", (), (), "one", mesh)], mesh=mesh, chosen=chosen, seq_length=None))
    assert text.splitlines()[:3] == [
        "gpt2-medium: 1 parameters, 4 B, on 1 device",
        "mesh: data=1,fsdp=1,tensor=1",
        "step: 64 examples, micro-batch 4, remat none, computed in float32",
    ]
    assert re.search(r"^w +1  one number +\[\] +4 B  one$", text, re.MULTILINE)


def test_what_was_compiled_for_a_target_has_its_kernels():
    arrays = (Written("bf16[32,4096]", 2**20, 4, "jit(step)/mlp"),)
    compiled = dataclasses.replace(
        COMPILED, target="h100:8", overlapped=0.64, attention=("__cudnn$fmha",), launches=8362, largest=arrays
    )
    text = plain(report_of(gpt2_rows(), compiled=compiled))
    assert "compiled for h100:8 in 7.2s  mesh axis  predicted  compiled\n" in text
    assert (
        """\
overlap: 64% of the bytes move while matrix products or attention run
kernels: 8,362 launches in a step; attention: __cudnn$fmha

largest arrays written  bytes  times  where
bf16[32,4096]           1 MiB      4  jit(step)/mlp
"""
        in text
    )
    refused = dataclasses.replace(COMPILED, target="v6e:2x4", too_large="Used 45.30G of 31.25G hbm.")
    text = plain(report_of(gpt2_rows(), compiled=refused))
    assert "compiled for v6e:2x4: does not fit\nUsed 45.30G of 31.25G hbm.\n" in text
    assert "overlap" not in text


def test_stacked_layers_are_named():
    text = plain(report_of(stacked_rows()))
    assert re.search(f"32 layers {TIMES} 4096/4 {TIMES} 14336/2 +\\[-, fsdp, tensor\\] ", text)


def test_a_stream_that_knows_only_ascii():
    raw = io.BytesIO()
    console = open_console(io.TextIOWrapper(raw, encoding="ascii"), terminal=False)
    show_plan(as_json(small()), console)
    assert raw.getvalue().decode() == plain(small()).replace(TIMES, "x")


def test_a_tree_on_a_terminal(on_terminal):
    drawn = seen(on_terminal(small(), 100)).splitlines()
    start = drawn.index(next(line for line in drawn if line.startswith("parameters ")))
    assert [line.rstrip() for line in drawn[start + 2 : start + 7]] == [
        "├─ h/{0..1}/",
        f"│  ├─ fc/kernel       2  8/4 {TIMES} 32/2   [fsdp, tensor]       256 B  columns: makes 32 features",
        "│  └─ norm/scale      2  8            [-]                   64 B  vector of the residual stream",
        f"└─ wte/embedding      1  101 {TIMES} 8/4    [-, fsdp]            808 B  no axis of its own that divides",
        "",
    ]


def test_the_smallest_memory_has_a_bar_and_nothing_has_none(on_terminal):
    drawn = seen(on_terminal(small(), 100))
    bars = dict(
        re.findall(r"^(batch|gathered parameters|activations|total) +[\d.]+ \w+(?:  (.*?))? *$", drawn, re.MULTILINE)
    )
    assert bars == {"batch": "▎", "gathered parameters": "", "activations": "████████████", "total": "█" * 30}


def test_colours_tell_the_kinds_of_splits(on_terminal):
    drawn = on_terminal(small(device_memory=2**40), 100)
    line = {name: next(one for one in drawn.splitlines() if name in one) for name in ("fc/", "norm/", "wte/", "fits")}
    assert line["fc/"].startswith("\x1b[36m")
    assert line["norm/"].startswith("\x1b[2m")
    assert line["wte/"].startswith("\x1b[32m")
    assert line["fits"].startswith("\x1b[1;32mfits: \x1b[0m")


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(on_terminal, width):
    report = report_of(gpt2_rows(), device_memory=32 * GiB, runners_up=RUNNERS_UP, compiled=COMPILED)
    drawn = seen(on_terminal(report, width))
    assert max(map(len, drawn.splitlines())) <= width
    for group in report.groups:
        assert group.reason in " ".join(drawn.split()) or set(group.reason.split()) <= set(drawn.split())
    assert "…" not in drawn


def test_a_long_reason_goes_on_below_itself_while_there_is_room_for_it(on_terminal):
    report = small()
    fixed = len(f"└─ wte/embedding  count  101 {TIMES} 8/4    [fsdp, tensor]  per device  ")
    lines = seen(on_terminal(report, fixed + 20)).splitlines()
    first = next(number for number, line in enumerate(lines) if "fc/kernel" in line)
    assert lines[first].endswith("  256 B  columns: makes 32")
    assert lines[first + 1] == " " * fixed + "features"
    assert "  1  columns: makes 32 features" in seen(on_terminal(report, fixed + 19)).splitlines()


def test_collectives_of_a_kind_are_compared_together():
    report = report_of(gpt2_rows(), compiled=COMPILED)
    again = (*report.collectives, dataclasses.replace(report.collectives[1], what="more", bytes=2**28))
    text = plain(dataclasses.replace(report, collectives=again))
    assert re.search(r"^all-reduce +tensor +1 GiB +768 MiB$", text, re.MULTILINE)


def test_where_there_is_no_room_reasons_become_notes(on_terminal):
    drawn = seen(on_terminal(report_of(gpt2_rows()), 80))
    assert re.search(r"c_fc/\n.*bias  .* 144 KiB|bias .* 192 KiB  4\n", drawn)
    assert "  1  columns: makes 16 heads, 8 on each device\n  2  vector of the residual stream\n" in drawn
    assert len(re.findall("vector of the residual stream", drawn)) == 1


def test_control_characters_of_a_name_are_not_obeyed(on_terminal):
    drawn = on_terminal(small(model="evil\x1b[31m"), 100)
    assert "\x1b[31m" not in drawn
    assert "evil\\x1b[31m" in drawn


def test_the_words_for_meshes_sizes_and_specs():
    assert mesh_text({"data": 2, "tensor": 4}) == "data=2,tensor=4"
    assert sizes_text({"shape": [24, 9216, 36864], "parts": [1, 1, 8], "layers": 24}) == (
        f"24 layers {TIMES} 9216 {TIMES} 36864/8"
    )
    assert spec_text([[], ["tensor", "fsdp"]]) == "[-, tensor+fsdp]"
