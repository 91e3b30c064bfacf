"""Batches that vary: which count as another shape, what is said of them, and when they are too many."""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.chips.compiler import Fitting
from redco_cli.errors import PluginError
from redco_cli.runtime import program
from redco_cli.runtime.batch_shapes import BatchShapes
from redco_cli.runtime.program import Program

PLACE = "p.py: collate_fn"


def batch(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}


def told(*batches: dict[str, np.ndarray], dims: int = 1, limit: int | None = None) -> list[str]:
    said: list[str] = []
    shapes = BatchShapes(PLACE, said.append, dims=dims, limit=limit)
    for one in batches:
        shapes.see("train step", one)
    return said


def test_what_changed_is_told_once():
    assert told(batch(ids=(8, 128), y=(8,)), batch(ids=(8, 96), y=(8,)), batch(ids=(8, 64), y=(8,))) == [
        "p.py: collate_fn: the batches vary, and each new shape compiles the train step anew: batch['ids'] was "
        "[128] int32, then [96] int32 per example; pad to data.max_length, or up to the next of a few fixed lengths"
    ]


def test_keys_and_types_are_told_too():
    (missing,) = told(batch(ids=(8, 4), mask=(8, 4)), batch(ids=(8, 4)))
    assert "batch['mask'] was [4] int32, then missing per example" in missing
    (typed,) = told(batch(y=(8,)), {"y": np.zeros(8, np.float32)})
    assert "batch['y'] was [] int32, then [] float32 per example" in typed


def test_how_many_examples_a_batch_holds_does_not_count():
    assert told(batch(ids=(8, 4)), batch(ids=(3, 4)), batch(ids=(1, 4)), limit=1) == []
    assert told(batch(ids=(2, 8, 4)), batch(ids=(1, 16, 4)), dims=2, limit=1) == []


def test_one_shape_too_many_is_an_error_with_what_varied():
    lengths = [batch(ids=(8, length)) for length in (10, 11, 12, 13, 14)]
    assert len(told(*lengths, *lengths, limit=5)) == 1
    with pytest.raises(PluginError) as refused:
        told(*lengths, batch(ids=(8, 15)), limit=5)
    assert str(refused.value) == (
        "p.py: collate_fn: batches came in more than 5 shapes, and each compiles the train step anew: batch['ids'] "
        "was [10] int32, then [11] int32, [12] int32, ..., [15] int32 per example\n"
        "  -> pad to data.max_length, or up to the next of a few fixed lengths; or raise train.max_compilations"
    )
    assert refused.value.on_all_processes


def test_a_program_compiles_for_other_keys_of_the_same_shapes():
    compiled: list[str] = []
    total = Program("sum", lambda arrays: sum(arrays.values()), lambda what: nullcontext(compiled.append(what)))
    arrays = [{"a": jnp.ones(2)}, {"b": jnp.ones(2)}, {"a": jnp.ones(2)}, {"a": jnp.ones(3)}]
    assert [total(one).tolist() for one in arrays] == [[1, 1], [1, 1], [1, 1], [1, 1, 1]]
    assert total.compilations == len(compiled) == 3


def test_options_that_did_not_fit_are_not_tried_for_other_shapes(monkeypatch):
    tried, said = [], []

    def fitting(make, options):
        tried.append(dict(options))
        return Fitting(make({}), {}, "less" if options else None)

    monkeypatch.setattr(program, "compile_fitting", fitting)
    total = Program(
        "sum", lambda one: one["a"].sum(), lambda _: nullcontext(), options={"xla_a": True}, warn=said.append
    )
    assert [total({"a": jnp.ones(size)}).tolist() for size in (2, 3, 2)] == [2, 3, 2]
    assert tried == [{"xla_a": True}, {}]
    assert said == ["sum for batches of [2]: compiled with less"]
