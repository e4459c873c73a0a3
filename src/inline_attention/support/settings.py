"""Settings as fields of dataclasses: name, type, default, help text and bounds, each said once.

`setting` declares a field, and `settings_of` lists what the fields of a dataclass accept.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from inline_attention.support.text import did_you_mean, printable
from inline_attention.support.untrusted import UntrustedDataError, build_value

LARGEST_INTEGER = 2**63
BOUNDS = {
    "at_least": ("≥", operator.ge),
    "above": (">", operator.gt),
    "at_most": ("≤", operator.le),
    "below": ("<", operator.lt),
}
NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
PLURALS = {int: "whole numbers", float: "numbers"}
# Text that users write for other values.
WORDS = {"true": ("yes", "on", "y", "true"), "false": ("no", "off", "n", "false"), "null": ("none", "null", "~")}


@dataclass(frozen=True)
class Problem:
    """A problem with a setting, such as "optimizer.lr": what was expected, what came, what to do."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """Settings that cannot be used: all problems, their source, such as a file name, and advice on all of them."""

    def __init__(self, problems: Iterable[Problem], source: str = "the configuration", advice: str | None = None):
        self.problems = tuple(problems)
        self.source, self.advice = source, advice
        super().__init__(self.problems, source, advice)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        advice = "" if self.advice is None else f"\n{self.advice}"
        text = f"{count} problem{'s' if count > 1 else ''} in {self.source}:\n{lines}{advice}"
        return "\n".join(map(printable, text.split("\n")))


class BadValueError(ValueError):
    """A setting does not accept a value. `problem` says which, and why."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem = problem


def setting(default: Any, documentation: str, *, tasks: Collection[str] = (), **bounds: float) -> Any:
    """Declare a field of a dataclass, whose documentation is its help text, and a comment in YAML.

    `tasks` use it; all do if it is empty. Bounds of its numbers are `at_least`, `above`, `at_most` and `below`.
    """
    assert bounds.keys() <= BOUNDS.keys()
    start = {"default_factory": partial(dict, default)} if isinstance(default, dict) else {"default": default}
    return field(**start, metadata={"documentation": documentation, "bounds": bounds, "tasks": tuple(tasks)})


@dataclass(frozen=True)
class Setting:
    """A field of a section: its dotted name, such as "optimizer.lr", and what `setting` says of it."""

    path: str
    annotation: Any
    documentation: str
    bounds: Mapping[str, float]
    tasks: tuple[str, ...]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of its values: those of the union, or the one."""
        is_union = get_origin(self.annotation) in (Union, UnionType)
        return get_args(self.annotation) if is_union else (self.annotation,)

    @property
    def expected(self) -> str:
        """The values it accepts, in words."""
        limits = " and ".join(f"{BOUNDS[name][0]} {limit:g}" for name, limit in self.bounds.items())
        limits = f" {limits}" if limits else ""
        words: list[str] = []
        for kind in self.kinds:
            origin, arguments = get_origin(kind), get_args(kind)
            if origin is Literal:
                words += arguments
            elif origin is tuple:
                count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
                words.append(f"[{count}{PLURALS[arguments[0]]}{limits}]")
            elif origin is Mapping:
                words.append("a mapping such as {depth: 4} of plain values")
            else:
                words.append(NAMES[kind] + (limits if kind in PLURALS else ""))
        return " or ".join(words) if len(words) <= 2 else f"{', '.join(words[:-1])} or {words[-1]}"

    @property
    def is_text(self) -> bool:
        """True if its values are text: any, or one of several words."""
        return any(kind is str or get_origin(kind) is Literal for kind in self.kinds)

    @property
    def is_optional(self) -> bool:
        """True if null is one of its values."""
        return NoneType in self.kinds

    @property
    def is_pair(self) -> bool:
        """True if its values are two numbers."""
        kinds = [kind for kind in self.kinds if kind is not NoneType]
        return all(get_origin(kind) is tuple and len(get_args(kind)) == 2 for kind in kinds)

    def convert(self, value: Any) -> Any:
        """Return a value as the field holds it: lists as tuples, whole numbers as floats where floats are expected.

        Raises:
            BadValueError: If it has another type (true is not 1, "1" is not 1) or is out of bounds.
        """
        with suppress(UntrustedDataError):
            if get_origin(self.annotation) is Mapping:
                if isinstance(value, Mapping) and _is_plain(value):
                    return value
            elif self._holds(converted := build_value(self.annotation, value)):
                return converted
        message = f"expected {self.expected}, got {shown(value)}{self._advice(value)}"
        raise BadValueError(Problem(self.path, message))

    def _holds(self, value: Any) -> bool:
        """True if the numbers of a value are within the bounds."""
        items = value if isinstance(value, tuple) else (value,)
        numbers = [item for item in items if type(item) in (int, float)]
        fit = all(type(number) is float or abs(number) < LARGEST_INTEGER for number in numbers)
        bounds = [(BOUNDS[name][1], limit) for name, limit in self.bounds.items()]
        return fit and all(holds(number, limit) for number in numbers for holds, limit in bounds)

    def _advice(self, value: Any) -> str:
        choices = [choice for kind in self.kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            return did_you_mean(str(value).lower(), choices)
        takes_numbers = not {int, float}.isdisjoint(self.kinds)
        match value:
            case bool() if takes_numbers:
                return "; give a number"
            case int() | float() if str in self.kinds:
                return f'; in quotes, "{value}", it is text'
            case str() if takes_numbers and _is_number(value):
                return f"; write {value.strip()} without quotes"
            case str():
                meant = next((word for word, texts in WORDS.items() if value.lower() in texts), "")
                if meant and (NoneType if meant == "null" else bool) in self.kinds:
                    return f"; write {meant} without quotes"
            case float() if value.is_integer() and int in self.kinds and float not in self.kinds:
                return f"; write {int(value)}"
        return ""


@cache
def settings_of(section: type[Any], prefix: str = "", tasks: tuple[str, ...] = ()) -> dict[str, Setting]:
    """Return the settings of a dataclass by field name.

    `prefix` is that of their dotted names, such as "optimizer."; `tasks` use those fields that do not say.
    """
    annotations, found = get_type_hints(section), {}
    for entry in fields(section):
        notes = {**entry.metadata, "tasks": entry.metadata["tasks"] or tasks}
        found[entry.name] = Setting(prefix + entry.name, annotations[entry.name], **notes)
    return found


def order_problem(name: str, limits: tuple[float, float]) -> Iterator[tuple[str, str]]:
    """Yield name and message of a setting with two limits if the smaller one is not first."""
    low, high = limits
    if low > high:
        yield name, f"expected the smaller number first, got [{low:g}, {high:g}]"


def shown(value: Any) -> str:
    """Return a value as YAML writes it in one line, shortened if it is long; text is in quotes."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    text = printable(f"the text {text}" if isinstance(value, str) else text)
    return text if len(text) <= 100 else f"{text[:97]}..."


def unquoted(text: str) -> str:
    """Return text without quotes around it: JSON's double ones, or YAML's single ones."""
    if len(text) >= 2 and text[0] == text[-1] == "'" and "'" not in text[1:-1].replace("''", ""):
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        with suppress(ValueError):
            content = json.loads(text, strict=False)
            return content if isinstance(content, str) else text
    return text


def _is_plain(value: Any) -> bool:
    """True if a value can be written to YAML and read back unchanged."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
