"""What an environment is: how one system begins, what is seen of it, and how an action moves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Array = Any


@dataclass(frozen=True)
class System:
    """An environment; its functions are of one system, and traced by JAX.

    Attributes:
        spread: each number of its state begins anywhere between minus this and this, [S].
        actions: how many there are, numbered from 0; None where an action is made of numbers.
        most: the greatest such number, and minus the least.
        limit: steps after which an episode is cut off.
        observed: state [S] to what is seen of it: [O], or where several agents act what each of them sees, [agents, O].
        moved: state and action to the next state, the reward, which agents share, and whether the episode has come to
            its end.
        action_shape: of an action that is made of numbers: [1], or [agents, numbers].
    """

    spread: tuple[float, ...]
    actions: int | None
    most: float
    limit: int
    observed: Callable[[Array], Array]
    moved: Callable[[Array, Array], tuple[Array, Array, Array]]
    action_shape: tuple[int, ...] = (1,)
