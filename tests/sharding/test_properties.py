"""Properties of plans of random programs: valid, the same under any names, and computing the same as one device."""

import math

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from redco_cli.errors import DeviceError
from redco_cli.sharding import make_plan, read
from tests.sharding.programs.random import MESHES, WHOLE, Attention, Mlp, Sketch, sketches, small_sketches
from tests.sharding.trial import attempt, due_to_rounding

TOLERANCE = 1e-5
MEANINGLESS = 0.01
"""Error of a gradient by rounding from which on no step can be compared."""
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
quickly = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
run_few = settings(
    max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=UNSHRUNK
)
run_many = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), phases=UNSHRUNK)
read_many = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))


def reading_of(sketch, called=None, order=None):
    """The program with its parameters under other names, and in another order of the dict."""
    called = called or {name: name for name in sketch.shapes()}
    shapes = {called[name]: shape for name, shape in sketch.shapes().items()}
    params = {name: jax.ShapeDtypeStruct(shapes[name], "float32") for name in order or shapes}
    return read(lambda p, b: sketch.loss({name: p[called[name]] for name in called}, b), params, sketch.batch())


def plan_of(sketch, reading=None):
    """None where the guards refuse it: too much of a toy is whole, or heads do not divide."""
    try:
        return make_plan(reading or reading_of(sketch), sketch.sizes)
    except DeviceError:
        return None


def entries(spec, rank):
    found = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return found + [()] * (rank - len(found))


def check_valid(sketch, plan):
    units = sketch.units()
    for row in plan.rows:
        rank = len(row.shape)
        lives, used = entries(row.spec, rank), entries(row.gathered, rank)
        for dims in (lives, used):
            axes = [axis for dim in dims for axis in dim]
            assert len(axes) == len(set(axes)), f"{row}: an axis twice"
            assert set(axes) <= {"fsdp", "tensor"}
        for size, dim in zip(row.shape, lives, strict=True):
            assert size % math.prod(sketch.sizes[axis] for axis in dim) == 0, f"{row}: does not divide"
        if "stored in shards" not in row.reason:
            assert [tuple(axis for axis in dim if axis != "fsdp") for dim in lives] == used, row
        assert all("fsdp" not in dim for dim in used), row
        for size, dim, unit in zip(row.shape, used, units[row.path], strict=True):
            shard = size / sketch.sizes["tensor"] if "tensor" in dim else size
            if "along with the head" in row.reason and unit != WHOLE:
                continue
            if "uneven parts" in row.reason:
                continue
            assert shard == size if unit == WHOLE else shard % unit == 0, f"{row}: cut inside {unit}"
        if sketch.scanned and row.path not in ("embedding", "head"):
            assert lives[0] == (), f"{row}: layers are split"
    held = sum(row.bytes_per_device for row in plan.rows)
    assert held == plan.bytes_per_device <= plan.bytes


@quickly
@given(sketches)
def test_every_plan_is_valid(sketch):
    plan = plan_of(sketch)
    assume(plan is not None)
    check_valid(sketch, plan)


def check_pairs(sketch, plan):
    used = {row.path: entries(row.gathered, len(row.shape)) for row in plan.rows}
    alone = {row.path for row in plan.rows if row.reason.endswith("by rows alone, its results are summed")}
    for pair in sketch.pairs():
        assert len({"tensor" in used[path][dim] for path, dim in pair.items() if path not in alone}) <= 1, pair


@pytest.mark.slow
@quickly
@given(sketches)
@example(
    Sketch(
        (Mlp(100, "halves", transposed=False, biased=False, flat=False, activation="relu"),),
        layers=1,
        scanned=False,
        remat=False,
        normed=False,
        residual=True,
        tied=False,
        vocabulary=96,
        mesh=(1, 1, 8),
    )
)
def test_pairs_are_split_at_both_ends_or_at_none(sketch):
    plan = plan_of(sketch)
    assume(plan is not None)
    check_pairs(sketch, plan)


@pytest.mark.slow
@read_many
@given(sketches)
def test_very_many_plans_are_valid(sketch):
    plan = plan_of(sketch)
    assume(plan is not None)
    check_valid(sketch, plan)
    check_pairs(sketch, plan)


def check_names(sketch, seed):
    """Names decide in which order JAX sees parameters, and nothing else."""
    known = list(sketch.shapes())
    drawn = [str(number) for number in np.random.default_rng(seed).permutation(len(known))]
    plan = plan_of(sketch)
    renamed = plan_of(sketch, reading_of(sketch, dict(zip(known, drawn, strict=True)), sorted(drawn, reverse=True)))
    assert (plan is None) == (renamed is None)
    if plan is not None:
        rows = {row.path: (row.spec, row.gathered, row.reason) for row in renamed.rows}
        found = {name: rows[called] for name, called in zip(known, drawn, strict=True)}
        assert found == {row.path: (row.spec, row.gathered, row.reason) for row in plan.rows}


seeds = st.integers(0, 2**31)


@pytest.mark.slow
@quickly
@given(sketches, seeds)
@example(  # heads and the features between two attentions cost the same
    Sketch(
        (Attention(4, 1, 8, "flat", grouped=False, biased=False, causal=False),),
        layers=4,
        scanned=False,
        remat=False,
        normed=False,
        residual=False,
        tied=False,
        vocabulary=64,
        mesh=(1, 2, 4),
    ),
    3,
)
def test_names_and_order_do_not_matter(sketch, seed):
    check_names(sketch, seed)


@pytest.mark.slow
@read_many
@given(sketches, seeds)
def test_names_and_order_do_not_matter_for_very_many(sketch, seed):
    check_names(sketch, seed)


def check_equal(sketch, reshard_after_forward):
    plan = plan_of(sketch)
    assume(plan is not None)
    trial = attempt(sketch.loss, sketch.values(), sketch.batch(), plan, reshard_after_forward=reshard_after_forward)
    # Some programs are so steep that the last bit of a parameter changes more; a few draws of that tell its size only,
    # and nothing where it is no longer small.
    if trial.worst >= TOLERANCE:
        rounding = due_to_rounding(sketch.loss, sketch.values(), sketch.batch())
        assume(rounding < MEANINGLESS)
        assert trial.worst < 5 * rounding, trial.gradients


@run_few
@given(small_sketches, st.booleans())
def test_a_step_equals_one_on_one_device(sketch, reshard_after_forward):
    check_equal(sketch, reshard_after_forward)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@run_many
@given(sketches, st.booleans())
def test_very_many_steps_equal_those_on_one_device(sketch, reshard_after_forward):
    check_equal(sketch, reshard_after_forward)


def test_meshes_are_all_of_eight_devices():
    assert len(MESHES) == len(set(MESHES)) == 10
    assert all(math.prod(mesh) == 8 for mesh in MESHES)


@pytest.mark.slow
@quickly
@given(sketches)
def test_few_random_programs_are_refused(sketch):
    """So that the properties above are about something: heads divide in most, and little is whole."""
    if plan_of(sketch) is None:
        with pytest.raises(DeviceError, match=r"whole on every|heads"):
            make_plan(reading_of(sketch), sketch.sizes)
