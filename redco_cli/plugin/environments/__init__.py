"""Systems to learn control in, written in JAX: gymnasium's, and one of several agents; for plugins that play.

In comes the state of many environments and a function that acts; out come their states some steps later, and what was
seen, done and gained in between. Nothing is random but what follows from the seed of an environment and its time, so
that it is the same on every mesh and after a stop. Begin with `playing.py`; `system.py` says what an environment is.
"""

from redco_cli.plugin.environments.acrobot import ACROBOT
from redco_cli.plugin.environments.cartpole import CARTPOLE
from redco_cli.plugin.environments.examples import (
    as_arrays,
    as_batch,
    as_examples,
    draw_episodes,
    finished,
    flat,
    unseen,
)
from redco_cli.plugin.environments.particles import simple_spread
from redco_cli.plugin.environments.pendulum import PENDULUM
from redco_cli.plugin.environments.playing import Act, begun, play, whole_episodes
from redco_cli.plugin.environments.replay import before_training, collected, noisy, train_on_replay
from redco_cli.plugin.environments.system import System

SYSTEMS = {"cartpole": CARTPOLE, "acrobot": ACROBOT, "pendulum": PENDULUM}
"""Those in which one acts, by name."""

__all__ = [
    "SYSTEMS",
    "Act",
    "System",
    "as_arrays",
    "as_batch",
    "as_examples",
    "before_training",
    "begun",
    "collected",
    "draw_episodes",
    "finished",
    "flat",
    "noisy",
    "play",
    "simple_spread",
    "train_on_replay",
    "unseen",
    "whole_episodes",
]
