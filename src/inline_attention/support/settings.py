"""Settings as fields of dataclasses: name, type, default, help text and bounds, each said once.

`setting` declares a field. `settings_of` lists the fields of a dataclass with what they accept, and `read_settings`
builds one from data that a user or a stranger wrote.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from inline_attention.support.text import did_you_mean, printable

LARGEST_INTEGER = 2**63
Section = TypeVar("Section")


class BadValueError(ValueError):
    """A setting does not accept a value. The message says what was expected, what came and what to do."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, or of each number of a tuple."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """True if `value` lies within."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (("≥", self.at_least), (">", self.above), ("≤", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


def setting(default: Any, documentation: str, *, tasks: Collection[str] = (), **bounds: float) -> Any:
    """Declare a field of a dataclass.

    Args:
        default: Default value.
        documentation: Help text, and comment in YAML.
        tasks: Tasks that use it; empty if all do.
        **bounds: Limits of its numbers, see `Bounds`.
    """
    metadata = {"documentation": documentation, "bounds": Bounds(**bounds), "tasks": tuple(tasks)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """A field of a section.

    Attributes:
        path: Dotted name, such as "optimizer.lr".
        annotation: Type.
        bounds: Limits of its numbers.
        documentation: Help text.
        tasks: Tasks that use it; empty if all do.
    """

    path: str
    annotation: Any
    bounds: Bounds
    documentation: str
    tasks: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """The values it accepts, in words."""
        limits = f" {self.bounds}" if str(self.bounds) else ""
        words: list[str] = []
        for kind in _alternatives(self.annotation):
            if get_origin(kind) is Literal:
                words += get_args(kind)
            elif get_origin(kind) is tuple:
                count = "" if get_args(kind)[-1] is Ellipsis else f"{len(get_args(kind))} "
                words.append(f"[{count}{_PLURALS[get_args(kind)[0]]}{limits}]")
            elif get_origin(kind) is Mapping:
                words.append("a mapping such as {depth: 4} of plain values")
            else:
                words.append(_NAMES[kind] + (limits if kind in _PLURALS else ""))
        return " or ".join(words) if len(words) <= 2 else f"{', '.join(words[:-1])} or {words[-1]}"

    @property
    def is_text(self) -> bool:
        """True if its values are text: any, or one of several words."""
        return any(kind is str or get_origin(kind) is Literal for kind in _alternatives(self.annotation))

    @property
    def is_optional(self) -> bool:
        """True if null is one of its values."""
        return NoneType in _alternatives(self.annotation)

    @property
    def is_mapping(self) -> bool:
        """True if it holds names of the user's choice."""
        return get_origin(self.annotation) is Mapping

    def convert(self, value: Any) -> Any:
        """Return a value as the field holds it: lists as tuples, whole numbers as floats where floats are expected.

        Raises:
            BadValueError: If it has another type (true is not 1, "1" is not 1) or is out of bounds.
        """
        for annotation in _alternatives(self.annotation):
            if _fits(value, annotation):
                converted = _converted(value, annotation)
                if not all(self.bounds.hold(number) for number in _numbers(converted)):
                    break
                return converted
        raise BadValueError(f"expected {self.expected}, got {shown(value)}{self._advice(value)}")

    def _advice(self, value: Any) -> str:
        alternatives = _alternatives(self.annotation)
        choices = [choice for kind in alternatives if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            return did_you_mean(str(value).lower(), choices)
        if isinstance(value, bool) and {int, float} & set(alternatives):
            return "; give a number"
        if isinstance(value, (int, float)) and str in alternatives:
            return f'; in quotes, "{value}", it is text'
        if isinstance(value, str):
            if {int, float} & set(alternatives) and _is_number(value):
                return f"; write {value.strip()} without quotes"
            if bool in alternatives and value.lower() in ("yes", "on", "y", "no", "off", "n", "true", "false"):
                return f"; write {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'} without quotes"
            if NoneType in alternatives and value.lower() in ("none", "null", "~"):
                return "; write null without quotes"
        if isinstance(value, float) and value.is_integer() and int in alternatives and float not in alternatives:
            return f"; write {int(value)}"
        return ""


@cache
def settings_of(section: type[Any], prefix: str = "", tasks: tuple[str, ...] = ()) -> dict[str, Setting]:
    """Return the settings of a dataclass by field name.

    Args:
        section: A dataclass whose fields `setting` declares.
        prefix: Prefix of their dotted names, such as "optimizer.".
        tasks: Tasks that use those fields that do not say.
    """
    annotations = get_type_hints(section)
    return {
        entry.name: Setting(
            prefix + entry.name,
            annotations[entry.name],
            entry.metadata["bounds"],
            entry.metadata["documentation"],
            entry.metadata["tasks"] or tasks,
        )
        for entry in fields(section)
    }


def read_settings(section: type[Section], values: Mapping[str, Any]) -> Section:
    """Build a section from untrusted values; missing ones get their defaults.

    Raises:
        BadValueError: With the first unknown name or bad value.
    """
    known, converted = settings_of(section), {}
    for name, value in values.items():
        if name not in known:
            raise BadValueError(f"there is no setting {printable(name)[:60]}{did_you_mean(name, known)}")
        try:
            converted[name] = known[name].convert(value)
        except BadValueError as error:
            raise BadValueError(f"{name}: {error}") from None
    return section(**converted)


def shown(value: Any) -> str:
    """Return a value as YAML writes it in one line, shortened if it is long; text is in quotes."""
    if isinstance(value, str):
        text = f"the text {quoted(value)}"
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = type(value).__name__
    text = printable(text)
    return text if len(text) <= 100 else f"{text[:97]}..."


def quoted(text: str) -> str:
    """Return text in double quotes, which `unquoted` removes again."""
    return json.dumps(text, ensure_ascii=False)


def unquoted(text: str) -> str:
    """Return text without quotes around it: JSON's double ones, or YAML's single ones."""
    if len(text) >= 2 and text[0] == text[-1] == "'" and "'" not in text[1:-1].replace("''", ""):
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        with suppress(ValueError):
            content = json.loads(text, strict=False)
            return content if isinstance(content, str) else text
    return text


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
_PLURALS = {int: "whole numbers", float: "numbers"}


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    if origin is tuple:
        kinds = _kinds_of_items(annotation, value)
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(kinds)
            and all(_fits(item, kind) for item, kind in zip(value, kinds, strict=True))
        )
    if origin is Mapping:
        return isinstance(value, Mapping) and _is_plain(value)
    if annotation is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if annotation is int:  # not isinstance: True is an int to Python, but not a number of epochs
        return type(value) is int and abs(value) < LARGEST_INTEGER
    return type(value) is annotation


def _is_plain(value: Any) -> bool:
    """True if a value can be written to YAML and read back unchanged."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _converted(value: Any, annotation: Any) -> Any:
    if get_origin(annotation) is tuple:
        return tuple(
            _converted(item, kind) for item, kind in zip(value, _kinds_of_items(annotation, value), strict=True)
        )
    return float(value) if annotation is float else value


def _kinds_of_items(annotation: Any, value: Any) -> tuple[Any, ...]:
    """The type of each item of a tuple; for `tuple[int, ...]`, as many as the value has."""
    kinds = get_args(annotation)
    if kinds[-1] is not Ellipsis:
        return kinds
    return kinds[:1] * (len(value) if isinstance(value, (list, tuple)) else 0)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, tuple):
        return list(value)
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
