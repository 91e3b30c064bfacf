"""What can go wrong, said to a person: where it is, what the problem is, and what to do about it.

Every failure that a user can cause or repair is a `RedcoError`. The command line prints it and exits with its code;
anything else that escapes is a defect of redco and is reported as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: the place, as precisely as it is known: `recipes/x.yaml:14: train.steps`, `plugins/p.py:30: loss_fn`.
        problem: what was found there and why it cannot work.
        remedy: what to do; empty only when the problem itself says it.
    """

    where: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}\n  -> {self.remedy}" if self.remedy else text


class RedcoError(Exception):
    """A failure with its place and its remedy.

    `exit_code` is the process exit code that the command line ends with. `on_all_processes` says that every process of
    the run raises it at the same step, so that together they can still save.
    """

    exit_code = EXIT_FAILED
    on_all_processes = False

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(where, problem, remedy),)
        super().__init__(where, problem, remedy)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> RedcoError:
        """One error that reports several problems at once, in the order given."""
        first = problems[0]
        error = cls(first.where, first.problem, first.remedy)
        error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class UsageError(RedcoError):
    """The command line itself is wrong: a missing file, an argument that is no `key=value`."""

    exit_code = EXIT_USAGE


class RecipeError(RedcoError):
    """The recipe does not fit the schema, or its values contradict each other."""


class PluginError(RedcoError):
    """A plugin is missing, breaks the contract, or raised.

    `row` is which example of a batch it raised on, from 0, where it raised on some of them only.
    """

    row: int | None = None


class ModelError(RedcoError):
    """A model cannot be found, built, or loaded, or its config asks for something that is not honoured."""


class MissingKeyError(ModelError):
    """A model is to draw random numbers and is given no key; a plugin's call of it is to blame, with its line."""


class DataError(RedcoError):
    """Data is missing, empty, malformed, or does not fit what the recipe says of it."""


class ExampleError(DataError):
    """One example of a batch cannot be used: a plugin and its building blocks say what is wrong, redco says where.

    `row` is which of the examples it is, from 0. Without it redco finds out, by calling `collate_fn` on each alone.
    """

    def __init__(self, where: str, problem: str, remedy: str = "", row: int | None = None) -> None:
        super().__init__(where, problem, remedy)
        self.row = row


class DeviceError(RedcoError):
    """The devices at hand do not fit the recipe."""


class TrainingError(RedcoError):
    """Training cannot go on: the loss is not finite, for instance."""


class StorageError(RedcoError):
    """Something could not be written or read back: no permission, no space, a damaged checkpoint."""


class Interrupted(RedcoError):
    """The user pressed Ctrl-C; what was asked to be kept is on disk."""

    exit_code = EXIT_INTERRUPTED


class Requeue(RedcoError):
    """A scheduler asked the process to end; a checkpoint is saved, and the same command continues."""

    exit_code = EXIT_REQUEUE
