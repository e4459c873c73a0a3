"""Short texts for messages."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

NOTHING = "–"  # in tables, in place of a value that is missing


def did_you_mean(word: object, known: Iterable[str], *, most: int = 1) -> str:
    """Return "; did you mean A or B?" with the nearest known words, or "" if none is near."""
    nearest = difflib.get_close_matches(str(word)[:200], list(known), n=most)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def counted(count: int, plural: str) -> str:
    """Return a count with what is counted, in the singular for one: "1 box without area", "2 boxes without area"."""
    if count != 1:
        return f"{count:,} {plural}"
    ending = re.compile(r"\b(\w+?)(ies|(?<=x)es|(?<=ss)es|s)\b")
    singular = ending.sub(lambda word: word[1] + ("y" if word[2] == "ies" else ""), plural, count=1)
    singular = singular.replace(" that are ", " that is ").replace(" their ", " its ")
    return "1 " + re.sub(r"(?<= that )(leave|disagree|cover|become)\b", r"\1s", singular)


def some_of(names: Iterable[object], limit: int = 12) -> str:
    """Return the first few names, and how many more there are."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def number(value: float | None, decimals: int, unit: float = 1) -> str:
    """Return a value in a unit, such as "1,234.5", for tables."""
    return NOTHING if value is None else f"{value / unit:,.{decimals}f}"


def shortened(text: str, length: int) -> str:
    """Return a text of at most `length` characters. A longer one is cut and ends with …."""
    return text if len(text) <= length else f"{text[: max(length - 1, 1)]}…"


def show_difference(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """Return two lists of names, long ones shortened, as texts that start at the first difference."""
    shorter = min(len(first), len(second))
    start = next((place for place in range(shorter) if first[place] != second[place]), shorter)
    before, end = ("…, " if start else ""), f"nothing after {start}"
    shown = ([shortened(name, 60) for name in names[start:]] for names in (first, second))
    one, other = (before + some_of(names, 5) if names else end for names in shown)
    return one, other


def install_command(extra: str) -> str:
    """Return the command that installs an extra: of the clone that the package runs from, or of the package."""
    source, project = Path(__file__).resolve().parents[2], Path("pyproject.toml")
    clone = source.parent
    if source.name != "src" or not (clone / project).is_file():
        return f"pip install 'inline-attention[{extra}]'"
    here = "." if project.is_file() and project.samefile(clone / project) else clone
    return f"pip install -e {shlex.quote(f'{here}[{extra}]')}"


def page_of_docs(name: str) -> str:
    """Return where a page of the documentation is: in the clone, or where the wheel has put it."""
    clone = Path(__file__).resolve().parents[3]
    if (page := clone / "docs" / name).is_file():
        return f"docs/{name}" if clone.samefile(".") else str(page)
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("inline-attention") or []:
            if file.as_posix().endswith(f"doc/inline-attention/{name}"):
                return str(Path(file.locate()).resolve())
    return f"docs/{name}"


def natural_key(text: str) -> list[int | str]:
    """Return a key to sort by in which numbers count as numbers: "9.jpg" comes before "10.jpg"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text.lower())]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: object) -> str:
    """Return text that is safe on a terminal and in UTF-8: control characters and lone surrogates are escaped.

    Use it for everything that comes from a file: file names, class names, metadata.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
