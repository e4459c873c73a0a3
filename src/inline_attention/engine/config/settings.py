"""Every setting by its dotted name: what it means, what values it takes, and whether a given value is one."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from inline_attention.engine.config.schema import Bounds, TrainConfig
from inline_attention.support.text import printable

LARGEST_INTEGER = 2**63
SECTIONS: dict[str, type[Any]] = get_type_hints(TrainConfig)


class BadValueError(ValueError):
    """A value that a setting does not take; the text says what was expected, what came and what to do."""


@dataclass(frozen=True)
class Setting:
    """A field of a section.

    Attributes:
        path: Its dotted name, such as "optimizer.lr".
        annotation: Its type.
        bounds: Where its numbers must lie.
        documentation: What it means.
    """

    path: str
    annotation: Any
    bounds: Bounds
    documentation: str

    @property
    def expected(self) -> str:
        """What values it takes, in words."""
        return _in_words(self.annotation, self.bounds)

    @property
    def is_text(self) -> bool:
        """True if its values are text: any, or one of several words."""
        return any(kind is str or get_origin(kind) is Literal for kind in _alternatives(self.annotation))

    @property
    def is_optional(self) -> bool:
        """True if null is one of its values."""
        return NoneType in _alternatives(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether it is either on or off."""
        return self.annotation is bool

    @property
    def is_mapping(self) -> bool:
        """Whether it holds further names, which are not ours."""
        return get_origin(self.annotation) is Mapping

    def convert(self, value: Any) -> Any:
        """`value` as the field holds it: lists as tuples, whole numbers as floats where those are wanted.

        Raises:
            BadValueError: If it is of another type (true is not 1, "1" is not 1) or out of bounds.
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


def shown(value: Any) -> str:
    """A value as YAML writes it in one line, cut where it is long; text in quotes."""
    text = printable(f"the text {quoted(value)}" if isinstance(value, str) else _plain_text(value))
    return text if len(text) <= 100 else f"{text[:97]}..."


def quoted(text: str) -> str:
    """Return text in double quotes, which `unquoted` takes off again."""
    return json.dumps(text, ensure_ascii=False)


def unquoted(text: str) -> str:
    """Return text without the quotes around it, if there are any, as JSON's or YAML's single ones."""
    if len(text) >= 2 and text[0] == text[-1] == "'" and "'" not in text[1:-1].replace("''", ""):
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        with suppress(ValueError):
            content = json.loads(text, strict=False)
            return content if isinstance(content, str) else text
    return text


def did_you_mean(word: str, known: Sequence[str], *, prefix: str = "") -> str:
    """The end of an error message that suggests the nearest of `known`, after a prefix; empty if none is near."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def _plain_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


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
    """Whether a value can go to YAML and come back the same."""
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
    """The type of each item of a tuple; of `tuple[int, ...]` as many as the value has."""
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


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
}
_PLURALS = {int: "whole numbers", float: "numbers"}


def _in_words(annotation: Any, bounds: Bounds) -> str:
    limits = f" {bounds}" if str(bounds) else ""
    words: list[str] = []
    for kind in _alternatives(annotation):
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


def _all_settings() -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for section_name, section in SECTIONS.items():
        annotations = get_type_hints(section)
        for entry in fields(section):
            path = f"{section_name}.{entry.name}"
            metadata = entry.metadata
            settings[path] = Setting(path, annotations[entry.name], metadata["bounds"], metadata["documentation"])
    return settings


SETTINGS: dict[str, Setting] = _all_settings()
