"""Names of classes from a file: a line each, JSON, or the table that comes with ADE20K."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from inline_attention.data.sources import DataError

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


def read_class_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names in the order of the labels in masks.

    Args:
        path: A text with a name on each line; a table with tabs and a column "Name", as ADE20K's objectInfo150.txt; or
            JSON: a list of names, or an object that gives each label its name, without holes.

    Raises:
        DataError: If it cannot be read, is empty, or names a class twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the list of classes {path} cannot be read: {error}") from error
    names = _from_json(path, text) if path.suffix.lower() == ".json" else _from_text(text)
    if not names:
        raise DataError(f"the list of classes {path} is empty; write a name on each line")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"the list of classes {path} has {twice[0]!r} more than once; give each class a name of its own"
        )
    return tuple(names)


def _from_text(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    columns = [name.strip() for name in lines[0].split("\t")] if lines else []
    if "Name" in columns:
        place = columns.index("Name")
        return [line.split("\t")[place].strip() for line in lines[1:]]
    return lines


def _from_json(path: Path, text: str) -> list[str]:
    try:
        content: Any = json.loads(text)
        if isinstance(content, dict):
            labels = sorted((int(label), str(name)) for label, name in content.items())
            numbers = [label for label, _ in labels]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                raise ValueError("labels have holes; name the missing ones too")
            return [name for _, name in labels]
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise ValueError("expected a list of names")
    except (ValueError, IndexError) as error:
        raise DataError(f"the list of classes {path} is of no use: {error}") from error
    return content
