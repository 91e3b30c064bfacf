"""What a conversation may hold: messages, tools and weights as files have them, checked and brought into one form.

Keys that are null are left out, since files of objects fill in what other rows have. Arguments of tool calls are
objects, whether they were written as such or as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from redco_cli.errors import ExampleError
from redco_cli.plugin.rows import check_kind
from redco_cli.row_notes import note_rows

Message = dict[str, Any]
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
"""Who may say something."""
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Who says what under `from` in ShareGPT's form, besides `function_call`."""
CALL = "function_call"
TRAIN, WEIGHT = "train", "weight"
_MISTAKEN = ("loss", "mask", "masked", "loss_weight", "loss_mask", "train_on", "trainable", "training", "weights")
"""Keys that other programs have for what is `train` or `weight` here."""
_LEAST, _MOST = 1e-6, 1e6
"""Weights besides 0: float32 holds their sums."""
_NULLS = "with null inside of tools or arguments (as JSON text nothing is filled in)"
_EXAMPLE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


def refuse(problem: str, remedy: str) -> NoReturn:
    """Raises the ExampleError."""
    raise ExampleError("collate_fn", problem, remedy)


def checked_messages(found: Any, name: str) -> list[Message]:
    """The messages of a column, `role` and `content` or ShareGPT's `from` and `value`, as chat templates take them.

    Args:
        found: what the column holds.
        name: of the column.

    Raises:
        ExampleError: it is no conversation, or one of its messages cannot be used.
    """
    if not isinstance(found, list | tuple) or not all(isinstance(message, Mapping) for message in found):
        refuse(f"{name!r} holds {str(found)[:80]!r}, which is no conversation", f"write {_EXAMPLE}")
    if not found:
        refuse(f"{name!r} holds no messages", "write some, or leave the row out")
    checked = []
    for number, message in enumerate(found, start=1):
        given = {str(key): value for key, value in message.items() if value is not None}
        where = f"message {number} in the column {name!r}"
        if "from" in message and "role" not in given:
            checked.append(_from_sharegpt(given, where))
        elif "role" in message and ("content" in message or "tool_calls" in message):
            checked.append(_checked(given, where))
        else:
            refuse(f"{name!r} holds {str(found)[:80]!r}, which is no conversation", f"write {_EXAMPLE}")
    return checked


def _from_sharegpt(message: Mapping[str, Any], where: str) -> Message:
    speaker, value = message.get("from"), message.get("value", "")
    check_kind(message.get("value"), str, f"the value of {where}")
    rest = {key: one for key, one in message.items() if key not in ("from", "value")}
    if speaker == CALL:
        calls = _json(value, f"the value of {where}")
        return _checked({**rest, "role": ASSISTANT, "tool_calls": calls if isinstance(calls, list) else [calls]}, where)
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        known = (*SPEAKERS, CALL)
        _refuse_name(speaker, known, f"{where} is from {speaker!r}, but known are {', '.join(known)}")
    return _checked({**rest, "role": SPEAKERS[speaker], "content": value}, where)


def _checked(message: Message, where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        _refuse_name(role, ROLES, f"{where} has the role {role!r}, but roles are {', '.join(ROLES)}")
    _check_weight(message, where)
    calls = message.get("tool_calls")
    if calls:
        if role != ASSISTANT:
            refuse(f"{where} has tool_calls, but is of the {role}", "only the assistant calls tools: correct the role")
        if not isinstance(calls, list | tuple):
            refuse(f"the tool_calls of {where} are {str(calls)[:60]!r}, no list", "write a list of objects")
        message = {**message, "tool_calls": [_checked_call(call, where) for call in calls]}
    else:
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    if isinstance(content, list | tuple):
        _check_parts(content, where)
        message = {**message, "content": list(content)}
    elif content is not None or not calls:
        check_kind(content, str, f"the content of {where}")
    return {"content": None, **message}


def _check_parts(parts: Sequence[Any], where: str) -> None:
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in ("text", None) else None
        if not isinstance(text, str):
            refuse(f"the content of {where} has the part {str(part)[:60]!r}, which is no text", "leave such rows out")


def _checked_call(call: Any, where: str) -> Message:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        remedy = 'write {"type": "function", "function": {"name": "...", "arguments": {...}}}'
        refuse(f"a tool call of {where} is {str(call)[:60]!r}, without the name of a function", remedy)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"the arguments of {name} in {where}") if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        refuse(f"the arguments of {name} in {where} are {str(arguments)[:60]!r}, no object", 'write {"name": value}')
    if _has_null(arguments):
        note_rows(_NULLS, [0])
    outer = {key: one for key, one in call.items() if one is not None and key not in ("name", "arguments", "function")}
    return {"type": "function", **outer, "function": {"name": name, "arguments": dict(arguments)}}


def _check_weight(message: Message, where: str) -> None:
    for key in message:
        close = get_close_matches(key, (TRAIN, WEIGHT), n=1, cutoff=0.8) if key not in (TRAIN, WEIGHT) else ()
        if close or key in _MISTAKEN:
            refuse(f"{where} has the key {key!r}, which nothing reads", "write train: false, or a weight of 0 or more")
    train, weight = message.get(TRAIN), message.get(WEIGHT)
    if train is not None and not isinstance(train, bool):
        refuse(f"train of {where} is {train!r}", "write true or false, without quotes")
    if weight is not None:
        check_kind(weight, float, f"the weight of {where}")
        if not (weight == 0 or _LEAST <= weight <= _MOST):  # nan is neither
            refuse(f"the weight of {where} is {weight!r:.40}", "write 0, or a number between 1e-6 and 1e6")
    if train is not None and weight is not None:
        refuse(f"{where} has both train and weight", "keep one of them: train: false is weight: 0")
    if message["role"] != ASSISTANT and (train or weight):
        problem = f"{where} has a weight, but is of the {message['role']}: only answers carry one"
        refuse(problem, "leave it out, or set plugin.options.train_on: everything to learn every token")


def weight_of(message: Message) -> float:
    """How much a message counts in the loss: its `weight`, 0 for `train: false`, else 1."""
    return float(message.get(WEIGHT, 1.0 if message.get(TRAIN, True) else 0.0))


def checked_tools(found: Any, name: str) -> list[Any] | None:
    """The tools of a column: a list of objects, or JSON text of one; None for none.

    Raises:
        ExampleError: it holds something else.
    """
    tools = _json(found, f"the column {name!r}") if isinstance(found, str) and found.strip() else found
    tools = [_json(tool, f"the column {name!r}") if isinstance(tool, str) else tool for tool in _listed(tools, name)]
    for tool in tools:
        inner = tool.get("function") or tool if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            remedy = (
                'write {"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
            )
            refuse(f"a tool in the column {name!r} is {str(tool)[:60]!r}, without a name", remedy)
    if any(map(_has_null, tools)):
        note_rows(_NULLS, [0])
    return tools or None


def _listed(tools: Any, name: str) -> Sequence[Any]:
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list | tuple):
        refuse(f"the column {name!r} holds {str(tools)[:60]!r}, no list of tools", "write a list, or JSON text of one")
    return tools


def _has_null(value: Any) -> bool:
    def inside(one: Any) -> Iterator[Any]:
        return iter(one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ())

    return value is None or any(map(_has_null, inside(value)))


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        refuse(f"{what} is no JSON: {error}: {text[:60]!r}", "correct that row or leave it out")


def _refuse_name(given: Any, known: Sequence[str], problem: str) -> NoReturn:
    close = get_close_matches(str(given), known, n=1)
    refuse(
        problem, f"did you mean {close[0]}? correct the role in the data" if close else "correct the role in the data"
    )
