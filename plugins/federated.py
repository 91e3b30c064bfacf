"""Federated learning: clients train on examples of their own, and a server makes one network of what they return.

    change  = sum over clients (n_k / n) (w_k - w)       w_k: after local SGD from w on the n_k examples of client k
    FedAvg    w += change                                McMahan et al., 2017
    FedProx   the same; locally + proximal / 2 |w_k - w|^2                                 Li et al., 2020
    FedAdam   m = b1 m + (1 - b1) change, v = b2 v + (1 - b2) change^2, w += rate m / (sqrt(v) + adaptivity)
                                                         Reddi et al., 2021

Network, loss, and without `data.train` the digits are those of `image_classification`. `train.steps` counts the steps
of all clients: so many rounds are done as it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.errors import PluginError
from redco_cli.plugin.contract import Context, Params, Run
from redco_cli.plugin.parts import builtin, column

classification = builtin("image_classification")
build_model, load_examples = classification.build_model, classification.load_examples
collate_fn, loss_fn, predict_fn = classification.collate_fn, classification.loss_fn, classification.predict_fn

B1, B2 = 0.9, 0.99
"""Decay of FedAdam's moments, as in the paper."""


@dataclass(frozen=True)
class Options(classification.Options):  # type: ignore[name-defined, misc]
    """The options of `image_classification`, and these.

    Attributes:
        algorithm: what becomes of the clients' work: `fedavg`, `fedprox` or `fedadam`.
        clients: how many there are.
        share: of the clients, 0 to 1, that take part in a round, drawn anew for each.
        partition: who has which examples: `iid`, or `label_skew`, where a client has few classes.
        shards: so many pieces of the examples in the order of their classes make a client of `label_skew`.
        local_steps: of SGD, by each client in each round.
        proximal: weight of the distance that FedProx keeps to the beginning of the round.
        server_rate: learning rate of FedAdam.
        adaptivity: added to the denominator of FedAdam.
    """

    algorithm: Literal["fedavg", "fedprox", "fedadam"] = "fedavg"
    clients: int = 10
    share: float = 1.0
    partition: Literal["iid", "label_skew"] = "iid"
    shards: int = 2
    local_steps: int = 10
    proximal: float = 0.001
    server_rate: float = 0.03
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        """Refuses what is no federation."""
        if min(self.clients, self.shards, self.local_steps) < 1 or not 0 < self.share <= 1:
            raise ValueError("clients, shards and local_steps are at least 1, and share is above 0 and at most 1")


def partition(ctx: Context, labels: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Which examples each client has, by their numbers: every example once, and as evenly as can be."""
    options, draw = ctx.options, np.random.default_rng([ctx.recipe.seed, 0])
    order = draw.permutation(len(labels))
    if options.partition == "iid":
        return np.array_split(order, options.clients)
    order = order[np.argsort(np.array(labels)[order], kind="stable")]
    shards = np.array_split(order, options.clients * options.shards)
    hands = draw.permutation(len(shards)).reshape(options.clients, options.shards)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]


def proximal(weight: float) -> optax.GradientTransformation:
    """Adds the gradient of weight / 2 |w - start|^2, `start` being where the optimizer's state was begun."""

    def update(updates: Params, state: Any, params: Params) -> tuple[Params, Any]:
        def pulled(gradient: jax.Array, now: jax.Array, start: jax.Array) -> jax.Array:
            return gradient + weight * (now - start)

        return jax.tree.map(pulled, updates, params, state["start"]), state

    return optax.GradientTransformation(lambda params: {"start": params}, update)


def optimizer_fn(ctx: Context, schedule: Any) -> Any:
    """What clients train with: SGD, begun anew in every round."""
    sgd = optax.sgd(schedule)
    return optax.chain(proximal(ctx.options.proximal), sgd) if ctx.options.algorithm == "fedprox" else sgd


def mean_change(start: Params, ends: Sequence[Params], counts: Sequence[int]) -> Params:
    """How far the clients have moved from `start`, on average over the examples, of which each has a number."""

    def mean(begun: jax.Array, *ended: jax.Array) -> jax.Array:
        moves = (count / sum(counts) * (end - begun) for count, end in zip(counts, ended, strict=True))
        return sum(moves, jnp.zeros_like(begun))

    return jax.tree.map(mean, start, *ends)


def server_step(options: Options, state: dict[str, Any], change: Params) -> Params:
    """What the server adds to the parameters after a round; the moments of FedAdam are kept in `state`."""
    if options.algorithm != "fedadam":
        return change
    first = state.get("first") or jax.tree.map(jnp.zeros_like, change)
    second = state.get("second") or jax.tree.map(lambda leaf: jnp.full_like(leaf, options.adaptivity**2), change)
    state["first"] = jax.tree.map(lambda m, d: B1 * m + (1 - B1) * d, first, change)
    state["second"] = jax.tree.map(lambda v, d: B2 * v + (1 - B2) * d**2, second, change)

    def adam(m: jax.Array, v: jax.Array) -> jax.Array:
        return options.server_rate * m / (jnp.sqrt(v) + options.adaptivity)

    return jax.tree.map(adam, state["first"], state["second"])


def run_fn(run: Run) -> None:
    """Rounds, until no other fits into the steps of the run.

    Raises:
        PluginError: not even one does.
    """
    options, seed = run.ctx.options, run.ctx.recipe.seed
    examples = list(run.examples)
    clients = partition(run.ctx, column(examples, options.label, int))
    chosen = max(1, round(options.share * options.clients))
    if run.steps < chosen * options.local_steps:
        problem = f"{run.steps} steps are less than one round: {chosen} clients, {options.local_steps} steps each"
        raise PluginError("train.steps", problem, "give more, or fewer clients, share or local_steps in plugin.options")
    run.state = run.state or {"round": 0}
    while run.step + chosen * options.local_steps <= run.steps:
        draw = np.random.default_rng([seed, 1, run.state["round"]])
        picked = [clients[index] for index in draw.choice(len(clients), chosen, replace=False)]
        start, ends = run.params, []
        for own in picked:
            run.params = start
            run.reset_optimizer()
            run.train([examples[index] for index in own], steps=options.local_steps)
            ends.append(run.params)
        change = mean_change(start, ends, [len(own) for own in picked])
        run.params = jax.tree.map(jnp.add, start, server_step(options, run.state, change))
        run.state["round"] += 1
        run.log({"round": run.state["round"]})
        run.save()
