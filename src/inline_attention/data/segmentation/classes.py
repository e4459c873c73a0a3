"""Names of classes from a file: a line each, JSON, or the table that comes with ADE20K."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from inline_attention.data.sources import DataError
from inline_attention.support.files import read_bounded
from inline_attention.support.untrusted import parse_json

MAX_BYTES = 2**20
CLASS_FILES = ("classes.txt", "classes.json", "objectInfo150.txt")


def find_class_file(root: str | os.PathLike[str]) -> Path:
    """The first of `CLASS_FILES` in a folder.

    Raises:
        DataError: If there is none.
    """
    for name in CLASS_FILES:
        if (file := Path(root) / name).is_file():
            return file
    raise DataError(f"{root} has no list of classes; expected classes.txt with a name on each line, or classes.json")


def read_class_names(path: str | os.PathLike[str], *, reduce_zero_label: bool = False) -> tuple[str, ...]:
    """Names in the order of the labels in masks.

    Args:
        path: A text with a name on each line; a table with tabs and a column "Name", as ADE20K's objectInfo150.txt; or
            JSON: a list of names, or an object that gives each number in maps its name, from 0 or 1 without holes.
        reduce_zero_label: As for `LabelRules`: 0 means "other", and a name that an object gives it is no class.

    Raises:
        DataError: If it cannot be read, is empty, or names a class twice.
    """
    path = Path(path)
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"the list of classes {path} cannot be read: {error}") from error
    is_json = path.suffix.lower() == ".json"
    names = _from_json(path, text, reduce_zero_label) if is_json else _from_text(path, text)
    if not names:
        raise DataError(f"the list of classes {path} is empty; write a name on each line")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"the list of classes {path} has {twice[0]!r} more than once; give each class a name of its own"
        )
    return tuple(names)


def _from_text(path: Path, text: str) -> list[str]:
    rows = {
        number: [cell.strip() for cell in line.split("\t")]
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    }
    columns = next(iter(rows.values()), [])
    if "Name" not in columns:
        return [line.strip() for line in text.splitlines() if line.strip()]
    place = columns.index("Name")
    names: list[str] = []
    for number, row in list(rows.items())[1:]:
        if len(row) <= place or not row[place]:
            raise DataError(f"the list of classes {path} has no name in line {number}; complete or remove it")
        names.append(row[place])
    return names


def _from_json(path: Path, text: str, reduce_zero_label: bool) -> list[str]:
    try:
        content: Any = parse_json(text)
        if isinstance(content, dict):
            return _by_number([(int(label), str(name)) for label, name in content.items()], reduce_zero_label)
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise ValueError("expected a list of names")
    except ValueError as error:
        raise DataError(f"the list of classes {path} is of no use: {error}") from error
    return content


def _by_number(named: list[tuple[int, str]], reduce_zero_label: bool) -> list[str]:
    numbers, names = [number for number, _ in sorted(named)], [name for _, name in sorted(named)]
    start = 0 if 0 in numbers else 1
    if numbers != list(range(start, start + len(numbers))):
        found = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        raise ValueError(f"its numbers are {found}; number the classes from 0 or from 1 without holes")
    return names[1:] if reduce_zero_label and start == 0 else names
