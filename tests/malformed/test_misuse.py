"""What `ctx` offers, used otherwise than the guide says: each message ends with what to write instead."""

import pytest

from tests.malformed.test_plugins import LOSS, MODEL, PREDICTION

ON = "\n  on the batch x float32[8, 2], y int32[8]\n  -> "
STATEFUL = """
def init_state(ctx, params):
    return {"mean": np.zeros(2, np.float32)}


def update_state(ctx, state, params, stats):
    return RETURNED
"""
BATCH_NORM = (
    ("return nn.Dense(3)(x)", "return nn.Dense(3)(nn.BatchNorm(not train)(x))"),
    ("(self, x)", "(self, x, train)"),
)
KEPT = """
def init_state(ctx, params):
    return ctx.model.init_variables()


def update_state(ctx, state, params, stats):
    return state
"""
STATISTICS = (
    "give the call what the module keeps: variables=ctx.state, mutable=list(ctx.state) if train else False; with "
    "mutable "
    'it returns (output, updated), and Loss(..., stats={"variables": (updated, 1)}) hands that to update_state'
)
NO_MODEL = (
    'ctx.model is None where build_model returns several models: take ctx.models["NAME"] with params["NAME"]; and '
    "before "
    "there is one, in build_model, init_batch and load_examples"
)
LOGITS = 'logits = ctx.model(params, batch["x"])'

CASES = {
    "a model that is misspelt": (
        [(LOSS, 'return ctx.models["modl"](params, batch["x"]).sum()')],
        "",
        'plugin.py:31: loss_fn: loss_fn raised KeyError at `return ctx.models["modl"](params, batch["x"]).sum()`: '
        '\'modl\''
        f"{ON}did you mean model?",
    ),
    "a model that is not declared": (
        [(LOSS, 'return ctx.models["teacher"](params, batch["x"]).sum()')],
        "",
        'plugin.py:31: loss_fn: loss_fn raised KeyError at `return ctx.models["teacher"](params, batch["x"]).sum()`: '
        f"'teacher'{ON}ctx.models has model; `models:` of the recipe or build_model names others",
    ),
    "one of several": (
        [(MODEL, 'return {"actor": Net(), "critic": Net()}')],
        "",
        'plugin.py:29: loss_fn: loss_fn raised TypeError at `logits = ctx.model(params, batch["x"])`: '
        f"'NoneType' object is not callable{ON}{NO_MODEL}",
    ),
    "before there is a model": (
        [(MODEL, "return Net(ctx.model.config)")],
        "",
        "plugin.py:15: build_model: build_model raised AttributeError at `return Net(ctx.model.config)`: 'NoneType' "
        "object "
        f"has no attribute 'config'\n  -> {NO_MODEL}",
    ),
    "a method of the module": (
        [
            ("class Net(nn.Module):", "class Net(nn.Module):\n    def sample(self, x): return x"),
            (LOGITS, 'logits = ctx.model.sample(params, batch["x"])'),
        ],
        "",
        'plugin.py:30: loss_fn: loss_fn raised AttributeError at `logits = ctx.model.sample(params, batch["x"])`: '
        'ctx.model '
        f"has no attribute 'sample'{ON}call that method of the module as ctx.model(params, ..., method=\"sample\")",
    ),
    "apply": (
        [(LOGITS, 'logits = ctx.model.apply({"params": params}, batch["x"])')],
        "",
        'plugin.py:29: loss_fn: loss_fn raised AttributeError at `logits = ctx.model.apply({"params": params}, '
        'batch["x"])`: '
        f"ctx.model has no attribute 'apply'{ON}call it: ctx.model(params, x), with train= and rng= for dropout",
    ),
    "a stat that there is not": (
        [(LOSS, 'return Loss(each.sum(), each.size, stats={"mean": batch["x"].sum(0)})')],
        STATEFUL.replace("RETURNED", '{"mean": stats["men"]}'),
        "plugin.py:50: update_state: update_state raised KeyError at `return {\"mean\": stats[\"men\"]}`: 'men'\n"
        "  -> did you mean mean?",
    ),
    "a stat of another name": (
        [(LOSS, 'return Loss(each.sum(), each.size, stats={"total": batch["x"].sum(0)})')],
        STATEFUL.replace("RETURNED", '{"mean": stats["x"]}'),
        "plugin.py:50: update_state: update_state raised KeyError at `return {\"mean\": stats[\"x\"]}`: 'x'\n"
        "  -> stats has total; the state has mean",
    ),
    "ctx.state in update_state": (
        [],
        STATEFUL.replace("RETURNED", '{"mean": 0.9 * ctx.state["mean"]}'),
        'plugin.py:50: update_state: update_state raised TypeError at `return {"mean": 0.9 * ctx.state["mean"]}`: '
        "'NoneType' object is not subscriptable\n"
        "  -> ctx.state is what init_state returned, in loss_fn and predict_fn only; update_state gets it as an "
        "argument, "
        "update_state(ctx, state, params, stats)",
    ),
    "assigned state": (
        [(LOSS, f'ctx.state["mean"] = batch["x"].mean(0)\n    {LOSS}')],
        STATEFUL.replace("RETURNED", "state"),
        "plugin.py: loss_fn: it assigns to ctx.state (mean), which is there to be read: nothing would come of it\n"
        "  -> hand update_state what it needs as Loss(..., stats={name: (sum, weight)}), and return the next state "
        "there",
    ),
    "more state": (
        [(PREDICTION, f'ctx.state["seen"] = batch["x"]\n    {PREDICTION}')],
        STATEFUL.replace("RETURNED", "state"),
        "plugin.py: predict_fn: it assigns to ctx.state (seen), which is there to be read: nothing would come of it\n"
        "  -> hand update_state what it needs as Loss(..., stats={name: (sum, weight)}), and return the next state "
        "there",
    ),
    "numpy": (
        [(LOSS, "return np.log(each).sum()")],
        "",
        "plugin.py:31: loss_fn: loss_fn raised TracerArrayConversionError at `return np.log(each).sum()`: The "
        "numpy.ndarray "
        f"conversion method __array__() was called on traced array with shape float32[8]{ON}"
        "use jax.numpy instead of numpy: what is traced has a shape, and no values yet",
    ),
    "if": (
        [(LOSS, "return each.mean() if each.sum() > 0 else 0.0")],
        "",
        "plugin.py:31: loss_fn: loss_fn raised TracerBoolConversionError at `return each.mean() if each.sum() > 0 "
        "else 0.0`: "
        f"Attempted boolean conversion of traced array with shape bool[].{ON}"
        "choose with jnp.where(condition, a, b) or jax.lax.cond: what is traced has no values yet that an `if` could "
        "see",
    ),
    "float": (
        [(LOSS, "return float(each.sum())")],
        "",
        "plugin.py:31: loss_fn: loss_fn raised ConcretizationTypeError at `return float(each.sum())`: Abstract tracer "
        "value "
        f"encountered where concrete value is expected: traced array with shape float32[]{ON}"
        "leave it an array, without float(), int(), bool() or .item(): what is traced has no value yet",
    ),
    "a mask as an index": (
        [(LOSS, "return each[each > 0].mean()")],
        "",
        "plugin.py:31: loss_fn: loss_fn raised NonConcreteBooleanIndexError at `return each[each > 0].mean()`: Array "
        "boolean "
        f"indices must be concrete; got bool[8]{ON}"
        "keep the shape, jnp.where(mask, x, 0).sum(): how many a traced mask picks is not known yet",
    ),
    "an index of a list": (
        [(LOSS, "return each.sum() * [1.0, 2.0][each.argmax()]")],
        "",
        "plugin.py:31: loss_fn: loss_fn raised TracerIntegerConversionError at `return each.sum() * [1.0, "
        "2.0][each.argmax()]`: The __index__() method was called on traced array with shape int32[]"
        f"{ON}index arrays of jax.numpy, x[i] or jnp.take(x, i): what is traced has no value yet that a list, or a "
        f"shape, "
        "could take",
    ),
    "batch norm without mutable": (
        [*BATCH_NORM, (LOGITS, 'logits = ctx.model(params, batch["x"], train=train, variables=ctx.state)')],
        KEPT,
        "plugin.py:11: __call__: loss_fn raised ModifyScopeVariableError at `return nn.Dense(3)(nn.BatchNorm(not "
        'train)(x))`: Cannot update variable "mean" in "/BatchNorm_0" because collection '
        f'"batch_stats" is immutable.{ON}{STATISTICS}',
    ),
    "batch norm without variables": (
        [*BATCH_NORM, (LOGITS, 'logits = ctx.model(params, batch["x"], train=False)')],
        KEPT,
        "plugin.py:11: __call__: loss_fn raised ScopeCollectionNotFound at `return nn.Dense(3)(nn.BatchNorm(not "
        'train)(x))`: Tried to access "mean" from collection "batch_stats" in "/BatchNorm_0" but the collection is '
        'empty.'
        f"{ON}{STATISTICS}",
    ),
    "an array that is misspelt": (
        [(LOSS, 'return (each * batch["yy"]).mean()')],
        "",
        "plugin.py:31: loss_fn: loss_fn raised KeyError at `return (each * batch[\"yy\"]).mean()`: 'yy'"
        f"{ON}did you mean y?",
    ),
    "a parameter that there is not": (
        [(LOSS, 'return params["head"].sum()')],
        "",
        "plugin.py:31: loss_fn: loss_fn raised KeyError at `return params[\"head\"].sum()`: 'head'"
        f"{ON}batch has x, y; params has Dense_0",
    ),
    "generation without a mask": (
        [
            (PREDICTION, 'return generate(ctx, params, {"input_ids": batch["y"][:, None]}, rng)'),
            ("import optax", "import optax\nfrom redco_cli.plugin.parts import generate"),
        ],
        "",
        "plugin.py:36: predict_fn: predict_fn raised KeyError at `return generate(ctx, params, {\"input_ids\": "
        "batch[\"y\"][:, None]}, rng)`: 'attention_mask'\n  on the batch x float32[4, 2], y int32[4]\n"
        '  -> parts.generate reads input_ids and attention_mask: `pad(rows, length, value, side="left")` makes both',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_misused_is_told_with_what_to_write(folder, name: str) -> None:
    replaced, plus, error = CASES[name]
    folder.plugin(*replaced, plus=plus)
    for command in ("validate", "train"):
        assert folder.refused(command, "recipe.yaml", "eval.predict=true") == error


def test_a_column_that_only_a_loss_needs(folder) -> None:
    folder.done("train", "recipe.yaml")
    folder.write(asked__jsonl='{"x": [1, 2]}\n')
    assert folder.refused("predict", "recipe.yaml", "--input", "asked.jsonl") == (
        "plugin.py:24: collate_fn: collate_fn raised KeyError at `y = np.array([e[\"y\"] for e in examples])`: 'y'\n"
        "  on 1 examples, the first with keys x\n"
        '  -> add it to the examples; or, where only a loss needs it, read it only where ctx.stage != "predict"'
    )
