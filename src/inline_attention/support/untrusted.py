"""Parse JSON and YAML from strangers: bounded in size, depth and digits, with one kind of error.

Parsers here return plain data: dicts, lists, strings, numbers, booleans and None. `build_dataclass` checks its shape.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import yaml

from inline_attention.support.text import shortened

Built = TypeVar("Built")
MAX_DEPTH = 50
MAX_TEXT_BYTES = 2**20
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


class UntrustedDataError(ValueError):
    """A text is malformed, too large or too deeply nested. The message is one sentence without the text's name."""


def parse_json(text: str | bytes, *, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Parse JSON of at most `max_bytes`, nested at most `MAX_DEPTH` deep; raise `UntrustedDataError` otherwise."""
    if len(text) > max_bytes:
        raise UntrustedDataError(f"it has {len(text):,} bytes, more than {max_bytes:,}")
    try:
        content = json.loads(text)
    except RecursionError:
        raise UntrustedDataError(_TOO_DEEP) from None
    except ValueError as error:  # malformed, not UTF-8, or a number with thousands of digits
        raise UntrustedDataError(f"it is not valid JSON: {error}") from None
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH + 1):
        parents = [value for value in level if isinstance(value, dict | list)]
        level = [item for parent in parents for item in (parent.values() if isinstance(parent, dict) else parent)]
        if not level:
            return content
    raise UntrustedDataError(_TOO_DEEP)


def load_yaml(text: str, loader: type[yaml.SafeLoader]) -> Any:
    """Parse YAML with a safe loader, after a look at its nesting; raise `UntrustedDataError` if it is malformed."""
    if len(text) > MAX_TEXT_BYTES:
        raise UntrustedDataError(f"it has {len(text):,} characters, more than {MAX_TEXT_BYTES:,}")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):  # the event parser does not recurse
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UntrustedDataError(_TOO_DEEP)
            if isinstance(event, yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=event.start_mark)
        return yaml.load(text, Loader=loader)
    except UntrustedDataError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise UntrustedDataError(f"it is not valid YAML: {getattr(error, 'problem', None) or error}{where}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # such as a number of 10,000 digits
        raise UntrustedDataError(f"it has a value that cannot be read: {error}") from None


def build_dataclass(kind: type[Built], content: object, where: str = "it") -> Built:
    """Build a dataclass or named tuple from parsed JSON, with every value checked against the type of its field.

    Fields are plain values, lists, dicts, tuples, unions and such classes. Keys without a field are ignored, so that
    newer files stay readable. `UntrustedDataError` if a field is missing or of another type, or a number is not finite.
    """
    if not isinstance(content, Mapping):
        raise UntrustedDataError(f"{where} must be an object, got {_short(content)}")
    hints, parameters = typing.get_type_hints(kind), inspect.signature(kind).parameters
    for name in hints:
        if name not in content and parameters[name].default is inspect.Parameter.empty:
            raise UntrustedDataError(f"{where} lacks {name!r}")
    known = {name: hint for name, hint in hints.items() if name in content}
    return kind(**{name: _checked(hint, content[name], f"{where}.{name}") for name, hint in known.items()})


def build_value(hint: Any, content: object) -> Any:
    """Return parsed JSON as a value of a type such as `list[SomeDataclass]`; see `build_dataclass`."""
    return _checked(hint, content, "it")


def _checked(hint: Any, value: Any, where: str) -> Any:
    """Return a value of the hinted type, or raise `UntrustedDataError`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            with suppress(UntrustedDataError):
                return _checked(option, value, where)
    elif origin is typing.Literal:
        if value in arguments and isinstance(value, str):
            return value
    elif isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        return build_dataclass(hint, value, where)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        any_length = origin is list or arguments[-1] is ...
        if any_length or len(arguments) == len(value):
            kinds = [arguments[0]] * len(value) if any_length else arguments
            return origin(_checked(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {str(key): _checked(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # false for NaN
            return float(value)
    elif hint in (int, str, bool, types.NoneType) and type(value) is hint:
        return value
    raise UntrustedDataError(f"{where} must be {_type_name(hint)}, got {_short(value)}")


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return shortened(text, 60)
