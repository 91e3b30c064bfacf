"""The one place where code that is not ours runs: what it raises becomes an error with its place."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from redco_cli.errors import PluginError, RedcoError
from redco_cli.recipe.redaction import scrubbed

_WHOLE_TRACEBACK = "fix the plugin; `redco --traceback ...` shows the whole traceback"
_REMEDIES = {
    "ScopeParamNotFoundError": "give a model its own parameters: where there are several, params has them by name, "
    'params["model"]'
}
"""By the name of an exception that other libraries raise, what a plugin most likely did."""


@contextlib.contextmanager
def guarded(where: str, doing: str, file: str, given: str = "") -> Iterator[None]:
    """Turns what plugin code raises into a `PluginError` that names the plugin's own line.

    A `sys.exit()` in a plugin is an error too: it would end the run as if all were done. Ctrl-C passes.

    Args:
        where: the place to name when no frame of the plugin is in the traceback.
        doing: what the core was doing, such as `loss_fn`.
        file: the plugin's source file.
        given: what the function was called with, shown after the exception.
    """
    try:
        yield
    except RedcoError:
        raise
    except (Exception, SystemExit) as error:  # plugin code is the user's: whatever it raises is theirs to see
        source = os.path.abspath(file)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
        if frames:
            named = [frame.name for frame in frames if not frame.name.startswith("<")]  # no comprehension, no lambda
            where = f"{file}:{frames[-1].lineno}: {(named or [frames[-1].name])[-1]}"
        elif isinstance(error, SyntaxError) and error.filename == source:
            where = f"{file}:{error.lineno}"
        line = f" at `{frames[-1].line}`" if frames and frames[-1].line else ""
        message = "\n".join(str(error).strip().splitlines()[:6])
        problem = f"{doing} raised {type(error).__name__}{line}{': ' if message else ''}{message}{given}"
        remedy = _REMEDIES.get(type(error).__name__, _WHOLE_TRACEBACK)
        raise PluginError(where, scrubbed(problem), remedy) from error
