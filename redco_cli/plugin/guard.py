"""The one place where code that is not ours runs: what it raises becomes an error with its place and a remedy."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from redco_cli.errors import MissingKeyError, PluginError, RedcoError
from redco_cli.recipe.redaction import scrubbed

_WHOLE_TRACEBACK = "fix the plugin; `redco --traceback ...` shows the whole traceback"
_STATISTICS = (
    "give the call what the module keeps: variables=ctx.state, mutable=list(ctx.state) if train else False; with "
    "mutable "
    'it returns (output, updated), and Loss(..., stats={"variables": (updated, 1)}) hands that to update_state'
)
_REMEDIES = {
    "ScopeParamNotFoundError": "give a model its own parameters: where there are several, params has them by name, "
    'params["model"]',
    "ModifyScopeVariableError": _STATISTICS,
    "ScopeCollectionNotFound": _STATISTICS,
    "ScopeVariableNotFoundError": _STATISTICS,
    "TracerArrayConversionError": "use jax.numpy instead of numpy: what is traced has a shape, and no values yet",
    "TracerBoolConversionError": "choose with jnp.where(condition, a, b) or jax.lax.cond: what is traced has no values "
    "yet that an `if` could see",
    "TracerIntegerConversionError": "index arrays of jax.numpy, x[i] or jnp.take(x, i): what is traced has no value "
    "yet "
    "that a list, or a shape, could take",
    "NonConcreteBooleanIndexError": "keep the shape, jnp.where(mask, x, 0).sum(): how many a traced mask picks is not "
    "known yet",
    "ConcretizationTypeError": "leave it an array, without float(), int(), bool() or .item(): what is traced has no "
    "value yet",
}
"""By the name of an exception that other libraries raise, what a plugin most likely did."""
_NO_MODEL = (
    'ctx.model is None where build_model returns several models: take ctx.models["NAME"] with params["NAME"]; and '
    "before "
    "there is one, in build_model, init_batch and load_examples"
)
_NO_STATE = (
    "ctx.state is what init_state returned, in loss_fn and predict_fn only; update_state gets it as an argument, "
    "update_state(ctx, state, params, stats)"
)
_OF_NONE = ((r"\.model\b(?!\s*=[^=])", _NO_MODEL), (r"\.state\b(?!\s*=[^=])", _NO_STATE))
"""What a line has that failed for a None in it, and why that is None."""
_DELETED = (
    "copy what is to outlast the next step, jax.tree.map(jnp.copy, run.params): a step takes the memory of what it "
    "updates"
)
_URL = re.compile(r"\s*\(https?://\S+\)")
_Raised = TypeVar("_Raised", bound=Exception)


def with_remedy(error: _Raised, remedy: str) -> _Raised:
    """An exception that `guarded` tells with this remedy."""
    vars(error)["remedy"] = remedy
    return error


class Named(dict[str, Any]):
    """What a plugin finds by name: a name that is not there is told beside those that are."""

    def __missing__(self, name: str) -> Any:
        there = f"ctx.models has {', '.join(self) or 'none yet'}; `models:` of the recipe or build_model names others"
        raise with_remedy(KeyError(name), _meant(name, {"ctx.models": self}) or there)


def _meant(name: str, known: Mapping[str, Iterable[str]]) -> str | None:
    close = difflib.get_close_matches(name, [one for names in known.values() for one in names], n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None


@contextlib.contextmanager
def guarded(
    where: str, doing: str, file: str, given: str = "", known: Mapping[str, Any] | None = None, missing: str = ""
) -> Iterator[None]:
    """Turns what plugin code raises into a `PluginError` that names the plugin's own line.

    A `sys.exit()` in a plugin is an error too: it would end the run as if all were done. Ctrl-C passes.

    Args:
        where: the place to name when no frame of the plugin is in the traceback.
        doing: what the core was doing, such as `loss_fn`.
        file: the plugin's source file.
        given: what the function was called with, shown after the exception.
        known: its arguments that are looked up by name, for one that is not there.
        missing: what to do about such a name, where none of these is like it.
    """
    try:
        yield
    except MissingKeyError as error:
        (told,), frames = error.problems, _frames(error, file)
        raise PluginError(_place(file, frames), told.problem, told.remedy) if frames else error from None
    except RedcoError:
        raise
    except (Exception, SystemExit) as error:  # plugin code is the user's: whatever it raises is theirs to see
        source, frames = os.path.abspath(file), _frames(error, file)
        if frames:
            where = _place(file, frames)
        elif isinstance(error, SyntaxError) and error.filename == source:
            where = f"{file}:{error.lineno}"
        line = f" at `{frames[-1].line}`" if frames and frames[-1].line else ""
        message = _message(error)
        problem = f"{doing} raised {type(error).__name__}{line}{': ' if message else ''}{message}{given}"
        remedy = _remedy(error, (frames[-1].line or "") if frames else "", known or {}, missing)
        raise PluginError(where, scrubbed(problem), remedy) from error


def place_in(file: str, error: BaseException) -> str | None:
    """The innermost line of a plugin's file that an exception came through, with its function; None without one."""
    frames = _frames(error, file)
    return _place(file, frames) if frames else None


def _frames(error: BaseException, file: str) -> list[traceback.FrameSummary]:
    """Those of the plugin in a traceback, the innermost last."""
    return [one for one in traceback.extract_tb(error.__traceback__) if one.filename == os.path.abspath(file)]


def _place(file: str, frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line, in the function that it is in: no comprehension, no lambda."""
    named = [frame.name for frame in frames if not frame.name.startswith("<")]
    return f"{file}:{frames[-1].lineno}: {(named or [frames[-1].name])[-1]}"


def _message(error: BaseException) -> str:
    """What an exception says, at most six lines; of those that have a remedy here, the first."""
    lines = str(error).strip().splitlines()
    known = any(one.__name__ in _REMEDIES for one in type(error).__mro__)
    return _URL.sub("", "\n".join(lines[: 1 if known else 6]))


def _remedy(error: BaseException, line: str, known: Mapping[str, Any], missing: str) -> str:
    """What to do: what the exception brings, what is known of its kind, or what its line shows."""
    if own := vars(error).get("remedy"):
        return str(own)
    for kind in type(error).__mro__:
        if kind.__name__ in _REMEDIES:
            return _REMEDIES[kind.__name__]
    if isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
        return next((why for part, why in _OF_NONE if re.search(part, line)), _WHOLE_TRACEBACK)
    if isinstance(error, RuntimeError) and "has been deleted" in str(error):
        return _DELETED
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        names = {what: [*map(str, one)] for what, one in known.items() if isinstance(one, Mapping)}
        there = "; ".join(f"{what} has {', '.join(found) or 'nothing'}" for what, found in names.items())
        elsewhere = any(error.args[0] in found for found in names.values())
        return (not elsewhere and _meant(error.args[0], names)) or missing or there or _WHOLE_TRACEBACK
    return _WHOLE_TRACEBACK
