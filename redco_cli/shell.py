"""How every command behaves in a shell: arguments that several share, errors as a message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any, TextIO

import typer
import typer.core

from redco_cli.console import note, print_error, warn
from redco_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, RedcoError
from redco_cli.recipe.redaction import scrubbed

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values to change: train.steps=100 model.dtype=bfloat16"),
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", metavar="last|best|PATH", help="Where parameters are from.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


_NO_OVERRIDES = (
    "This command takes no key=value: see its options, such as --mesh data=1,fsdp=4 and --batch-size of "
    "inspect-sharding, or give a recipe of two lines, `extends: RECIPE` and what differs."
)


_USAGE: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises of a command line; it exports only what it derives from that."""


class Commands(typer.core.TyperGroup):
    """Turns what a command raises into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command.

        Raises:
            typer.Exit: with the code of what the command raised.
        """
        try:
            return super().invoke(ctx)
        except _USAGE as error:
            if "extra argument" in error.message and "=" in error.message:
                error.message = f"{error.message.rstrip('.')}. {_NO_OVERRIDES}"
            raise
        except RedcoError as error:
            if ctx.params.get("show_traceback"):
                print(scrubbed(traceback.format_exc()), end="", file=sys.stderr)  # noqa: T201 - Python's words
            print_error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:  # the reader has seen enough; Python would complain again when it flushes
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_FAILED) from None


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What Python code warns of, as a line like ours."""
    warn(f"{message} ({category.__name__} at {filename}:{lineno})")
