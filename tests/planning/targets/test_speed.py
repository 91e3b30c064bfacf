"""How fast a planned step is: the same figures on the screen and in the report, by a formula that can be recomputed."""

import io
import json

import pytest
from rich.console import Console

from redco_cli.chips.table import CHIPS
from redco_cli.console.comparison import show_comparison
from redco_cli.console.speed import show_speed
from redco_cli.errors import UsageError
from redco_cli.planning.inspect import inspect, inspect_sharding
from redco_cli.planning.report import as_json, report_schema
from tests.planning.test_report import check
from tests.projects import LLAMA

STEP = {"batch_size": 16, "seq_length": 32}
FSDP, TENSOR = {"data": 1, "fsdp": 8, "tensor": 1}, {"data": 1, "fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def report():
    return inspect(json.dumps(LLAMA), target="2*h100:4", price=2.0, **STEP)


def test_a_plan_says_how_fast_it_is(report):
    speed = report.speed
    assert speed.basis == "plan"
    assert 0 < speed.low < speed.step < speed.high
    assert sum(term.seconds for term in speed.terms) == pytest.approx(speed.step)
    assert speed.tokens == pytest.approx(16 * 32 / speed.step)
    assert speed.tokens_of_a_chip == pytest.approx(speed.tokens / 8)
    assert speed.mfu == pytest.approx(speed.model_flops / (speed.step * 8 * CHIPS["h100"].flops["bfloat16"]))
    assert speed.cost_of_a_billion_tokens == pytest.approx(2.0 * 8 * speed.step / 3600 * 1e9 / (16 * 32))
    assert speed.cost_of_a_run is None


def test_its_operations_are_three_forward_passes(report):
    """By hand: the products of a Llama of these sizes, and half of the scores, as the causal mask leaves them."""
    width, layers, heads = (LLAMA[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    inner, vocabulary = LLAMA["intermediate_size"], LLAMA["vocab_size"]
    keys = LLAMA.get("num_key_value_heads", heads) * (width // heads)
    weights = layers * (2 * width * width + 2 * width * keys + 3 * width * inner) + width * vocabulary
    least = 3 * 2 * weights * 16 * 32
    scores = 3 * layers * 2 * 2 * 16 * 32 * 32 * width
    assert least < report.speed.model_flops <= least + scores


@pytest.mark.slow
def test_experts_count_as_many_tokens_as_choose_them():
    """Two of eight for each token, though they have room for twice as many; of a plan's time they are all part."""
    sizes = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    given = {"target": "2*h100:4", "batch_size": 16, "seq_length": 64, "mesh": FSDP}
    one, eight = (inspect(json.dumps(config), **given).speed for config in (LLAMA, sizes))
    width, layers, inner = (LLAMA[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    more = 3 * 2 * layers * 16 * 64 * width * (3 * inner + 8)  # the second of two, and the router
    assert eight.model_flops - one.model_flops == pytest.approx(more, rel=0.01)


def test_the_screen_says_it(report):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    show_speed(as_json(report)["speed"], console)
    said = console.file.getvalue()
    for text in ("time of a step", "total", "work and traffic of the plan", "throughput: ", "MFU: ", "formula: MFU = "):
        assert text in said
    assert "for a billion tokens (" in said
    assert "at 2.000 a chip-hour" in said


@pytest.mark.slow
def test_what_does_not_fit_has_no_speed():
    small = inspect(json.dumps(LLAMA), target="h100:8", device_memory=1000, mesh=FSDP, **STEP)
    assert (small.fits, small.speed) == (False, None)


def test_without_a_target_there_is_neither_speed_nor_price():
    assert inspect(json.dumps(LLAMA), devices=1, **STEP).speed is None
    with pytest.raises(UsageError, match="--price: there is no --target"):
        inspect(json.dumps(LLAMA), devices=1, price=2.0, **STEP)


@pytest.mark.slow
def test_another_mesh_is_compared_term_by_term():
    """`--why`: the same step where all that differs is the mesh."""
    asked = {"target": "2*h100:4", **STEP}
    document = inspect_sharding(json.dumps(LLAMA), mesh=FSDP, why=TENSOR, **asked)
    found, other = document["comparison"], inspect(json.dumps(LLAMA), mesh=TENSOR, **asked)
    assert "data=1,fsdp=4,tensor=2 (16 examples of 32 tokens, micro-batch 16, remat none" in found["second"]
    assert (found["first_fits"], found["second_fits"]) == (True, True)
    total = found["seconds"][-1]
    assert total["first"] == pytest.approx(document["speed"]["step"])
    assert total["second"] == pytest.approx(other.speed.step)
    assert sum(one["second"] for one in found["seconds"][:-1]) == pytest.approx(other.speed.step)
    assert found["memory"][-1] == {
        "name": "total",
        "first": sum(document["memory"].values()),
        "second": other.memory.total,
    }
    check(document, report_schema(), report_schema()["$defs"])
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    show_comparison(found, console)
    assert "all-reduce over tensor" in console.file.getvalue()


@pytest.mark.slow
def test_the_fastest_way_is_that_of_the_least_time_that_is_printed(report):
    """By the roughest estimate another mesh may be; what is said of the others are the times of their own plans."""
    own = inspect(json.dumps(LLAMA), target="2*h100:4", mesh=report.chosen.mesh, **STEP)
    assert own.speed.step == pytest.approx(report.speed.step)
    for other in report.runners_up:
        alone = inspect(json.dumps(LLAMA), target="2*h100:4", mesh=other.mesh, **STEP)
        assert alone.speed.step >= report.speed.step
        assert f"estimated {alone.speed.step / report.speed.step:.2f} times" in other.reason


@pytest.mark.slow
def test_what_has_no_tokens_has_a_cost_of_its_examples():
    speed = inspect("vit-base", target="2*v6e:2x2", price=2.0, batch_size=16, mesh={"fsdp": 8}).speed
    assert speed.cost_of_a_billion_tokens is None
    assert speed.cost_of_a_million_examples == pytest.approx(2.0 * 8 * speed.step / 3600 * 1e6 / 16)


@pytest.mark.parametrize("price", [float("inf"), float("nan"), 1e300])
def test_a_price_is_a_number(price):
    with pytest.raises(UsageError, match=r"--price: .* is no price of a chip for an hour"):
        inspect(json.dumps(LLAMA), target="h100:8", price=price, **STEP)


def test_only_one_other_plan_is_compared():
    with pytest.raises(UsageError, match="--diff: given beside --why"):
        inspect_sharding(json.dumps(LLAMA), why=TENSOR, diff="gpt2")
