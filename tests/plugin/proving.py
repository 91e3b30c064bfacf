"""A plugin's functions proved as a job proves them."""

import functools

from redco_cli.plugin import calls
from redco_cli.plugin.state import update_state


def prove(plugin, ctx, variables, batch, *, stage):
    """Traces `loss_fn`, with `update_state` where it is trained, or `predict_fn`."""

    def predict(given, batch, key):
        return calls.call_predict(plugin, given.told(ctx), given.params, batch, key)

    def loss(given, batch, key):
        return calls.call_loss(plugin, given.told(ctx), given.params, batch, key, train=stage == "train")

    update = functools.partial(update_state, plugin, ctx) if plugin.update_state and stage == "train" else None
    return calls.prove(predict if stage == "predict" else loss, variables, batch, update=update)
