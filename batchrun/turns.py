"""Chat turns as templates expect them: no null fields, content as the template reads it, arguments as objects."""

import json
from typing import Any

Message = dict[str, Any]

# Names under which a turn's reasoning is found; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class RowFaultError(Exception):
    """What is wrong with one row, in the words of its error column."""


def normalise_turn(turn: Any, where: str, iterates_content: bool) -> Message:
    """A copy of one turn, as templates expect it.

    Args:
        turn: the turn as it came out of the row.
        where: its name in messages, `messages[2]`.
        iterates_content: whether the template takes content as a list of parts; else text parts are joined.

    Raises:
        RowFaultError: no role, no content where there must be some, or parts that are not text.
    """
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise RowFaultError(f"{where} has no role: a turn is an object with role and content")
    made = {key: value for key, value in turn.items() if value is not None}
    reasoning = next((made[name] for name in _REASONING if name in made), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    if made.get("tool_calls"):
        made["tool_calls"] = [_tool_call(call) for call in made["tool_calls"]]
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = _content_parts(content, f"{where}.content", iterates_content)
    elif content is None:
        if not (made["role"] == "assistant" and (made.get("tool_calls") or reasoning is not None)):
            raise RowFaultError(f"{where} ({made['role']}) has no content")
    elif not isinstance(content, str):
        raise RowFaultError(f"{where}.content is {type(content).__name__}: it must be text, or a list of text parts")
    return made


def _content_parts(parts: list[Any], where: str, iterates_content: bool) -> str | list[Any]:
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowFaultError(f"{where}[{number}] is {kind!r}: only text parts can be read")
    return [{"type": "text", "text": text} for text in texts] if iterates_content else "".join(texts)


def _tool_call(call: Any) -> Any:
    """Arguments as the object that templates print, whether they came as one or as its JSON text."""
    if not isinstance(call, dict):
        return call
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _tool_call(inner)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else call


def without_nulls(value: Any) -> Any:
    """A copy without the members that are null: Arrow gives every struct the fields of all of them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
