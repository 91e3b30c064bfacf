"""State of a plugin: what its functions may return, and what its parameters may stand in for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import PluginError
from redco_cli.plugin.calls import call_loss
from redco_cli.plugin.contract import Context
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.plugin.state import Variables, init_state, update_state
from tests.plugin.proving import prove

PARAMS = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.zeros(4)}
BATCH = {"x": np.ones((3, 2), np.float32)}


def never(*_: object) -> None:
    raise AssertionError


def plugin(**functions: object) -> LoadedPlugin:
    return LoadedPlugin("p", "p.py", {}, never, never, never, **functions)  # type: ignore[arg-type]


def context() -> Context:
    recipe: object = None
    return Context(None, None, {}, recipe)  # type: ignore[arg-type]


def refused(call: object) -> str:
    with pytest.raises(PluginError) as found:
        call()  # type: ignore[operator]
    return str(found.value)


def test_numbers_become_arrays_with_a_type_that_lasts():
    begun = init_state(
        plugin(init_state=lambda ctx, params: {"count": 0, "scale": 1.0, "ema": params}), context(), PARAMS
    )
    assert [begun["count"].dtype, begun["scale"].dtype] == [jnp.int32, jnp.float32]
    assert not begun["scale"].weak_type
    assert init_state(plugin(), context(), PARAMS) is None


def test_state_holds_arrays_only():
    text = refused(lambda: init_state(plugin(init_state=lambda ctx, params: {"names": ["a"]}), context(), PARAMS))
    assert "p.py: init_state" in text
    assert "names/0 is 'a', which is no array" in text


def test_state_has_names():
    text = refused(lambda: init_state(plugin(init_state=lambda ctx, params: jnp.zeros(2)), context(), PARAMS))
    assert "checkpoints keep arrays by name" in text


def test_it_is_updated_with_the_new_parameters_means_and_the_step():
    def update(ctx, state, params, stats):
        return {"sum": params["b"].sum() + stats["mean"] + ctx.step}

    given = Variables(PARAMS, {"sum": jnp.zeros(3)}, jnp.int32(5))
    found = update_state(plugin(update_state=update), context(), given, {"mean": (jnp.array([2.0, 4, 6]), 2.0)})
    np.testing.assert_array_equal(found["sum"], [6, 7, 8])
    assert update_state(plugin(), context(), given, {}) is given.state


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        ({"n": 0}, "m is missing"),
        ({"n": 0, "m": np.zeros(2), "o": 1}, "o is not in its state"),
        ({"n": 0, "m": np.zeros(3)}, "m has shape [3], not [2]"),
        ({"n": 0.5, "m": np.zeros(2)}, "n is float32, not int32"),
    ],
)
def test_an_update_keeps_its_shapes(after, problem):
    before = Variables(PARAMS, {"n": jnp.int32(0), "m": jnp.zeros(2)}, jnp.int32(1))
    text = refused(lambda: update_state(plugin(update_state=lambda *_: after), context(), before, {}))
    assert "p.py: update_state" in text
    assert problem in text
    assert "-> return what init_state returns, with other values" in text


LOSS = """
import jax.numpy as jnp
from redco_cli.plugin.contract import Loss

def collate_fn(ctx, examples): ...
def predict_fn(ctx, params, batch, rng): return batch["x"] + ctx.step + ctx.state["n"]
def loss_fn(ctx, params, batch, rng, train):
    return Loss((batch["x"].sum() + ctx.state["n"]) * params["b"].sum(), 3, stats=STATS)
def init_state(ctx, params): return {"n": jnp.zeros(2)}
"""
UPDATE = "def update_state(ctx, state, params, stats): return {'n': state['n'] + stats['x'].sum() * ctx.step}\n"


@pytest.mark.parametrize(
    ("stats", "problem"),
    [
        ("[1]", "the stats are [1], no dict by name"),
        ("{'x': 'text'}", "the stat x is 'text'"),
        ("{'x': (batch['x'], batch['x'])}", "the stat x has the weight"),
    ],
)
def test_stats_are_sums_with_a_weight(load, stats, problem):
    loaded = load(LOSS.replace("STATS", stats) + UPDATE)
    assert problem in refused(lambda: prove(loaded, context(), state(), BATCH, stage="train"))


def test_stats_without_an_update_are_refused(load):
    loaded = load(LOSS.replace("STATS", "{'x': batch['x'].sum(0)}"))
    text = refused(lambda: prove(loaded, context(), state(), BATCH, stage="train"))
    assert "Loss.stats has x, but there is no update_state" in text


def test_an_update_without_its_beginning_is_refused(load):
    text = refused(lambda: load(LOSS.replace("STATS", "{}").replace("init_state", "begin") + UPDATE))
    assert "has update_state, but no init_state" in text


@pytest.mark.parametrize(
    ("update", "problem"),
    [
        ("state['n'] + 1", "it returned None\n  -> return what init_state returns, with other values"),
        ("return {'n': stats['n']}", "'n'\n  -> stats has x; the state has n"),
        ("return {'n': stats['xx']}", "'xx'\n  -> did you mean x?"),
    ],
)
def test_an_update_that_is_none_is_refused(load, update, problem):
    text = LOSS.replace("STATS", "{'x': (batch['x'].sum(), 3)}")
    loaded = load(f"{text}def update_state(ctx, state, params, stats): {update}\n")
    assert problem in refused(lambda: prove(loaded, context(), state(), BATCH, stage="train"))


def state() -> Variables:
    return Variables(PARAMS, {"n": jnp.float32(1.0)}, jnp.int32(7))


def test_state_and_step_reach_loss_and_prediction(load):
    loaded = load(LOSS.replace("STATS", "{'x': batch['x'].sum(0), 'tree': ({'a': batch['x']}, 2)}") + UPDATE)
    given = state()
    found = call_loss(loaded, given.told(context()), PARAMS, BATCH, None, train=True)
    np.testing.assert_array_equal(found.stats["x"][0], [3.0, 3.0])
    assert float(found.stats["x"][1]) == 3
    assert found.stats["tree"][0]["a"].shape == (3, 2)
    assert call_loss(loaded, given.told(context()), PARAMS, BATCH, None, train=False).stats == {}
    outputs = prove(loaded, context(), given, BATCH, stage="predict")
    assert outputs.shape == (3, 2)
    assert float(loaded.predict_fn(given.told(context()), PARAMS, BATCH, None)[0, 0]) == 1 + 7 + 1


class TestUse:
    def test_parameters_of_the_state_stand_in_for_those_of_training(self):
        given = Variables(PARAMS, {"ema": {"a": {"w": jnp.full((2, 3), 5.0)}}, "n": jnp.int32(0)})
        chosen = given.using("ema").params
        assert float(chosen["a"]["w"][0, 0]) == 5
        assert jax.tree.structure(chosen) == jax.tree.structure(PARAMS)
        assert given.using(None) is given

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("emma", "the plugin's state has no emma, but ema, n"),
            ("n", "n/ in the plugin's state is no parameter"),
            ("ema", "ema/a/w in the plugin's state is no parameter"),
        ],
    )
    def test_what_cannot(self, name, problem):
        given = Variables(PARAMS, {"ema": {"a": {"w": jnp.zeros(3)}}, "n": jnp.int32(0)})
        with pytest.raises(ValueError, match=problem):
            given.using(name)
        with pytest.raises(ValueError, match="has no ema, but nothing by name"):
            Variables(PARAMS).using("ema")
