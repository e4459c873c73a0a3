"""Elements of a page. Text is escaped wherever it comes from: only what this module made is taken as markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from inline_attention.support.text import printable

VOID_ELEMENTS = frozenset({"img", "meta", "input", "br"})


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


Content: TypeAlias = "str | Html | None"


def tag(element_name: str, *children: Content, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
        element_name: Such as "p".
        *children: Markup, text to be escaped, or None for nothing.
        **attributes: Underscores become hyphens and a last one is dropped (`class_`, `aria_label`); None and False
            leave the attribute out; numbers are rounded to what a screen can show.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if element_name in VOID_ELEMENTS:
        return Html(f"<{element_name}{written}>")
    return Html(f"<{element_name}{written}>{join(children)}</{element_name}>")


def join(children: Iterable[Content]) -> Html:
    """Markup and escaped text, one after the other."""
    return Html(
        "".join(child if isinstance(child, Html) else html.escape(printable(child)) for child in children if child)
    )


def table(header: Sequence[str], rows: Iterable[Sequence[Content]], *, caption: str, text_columns: int = 1) -> Html:
    """A table that scrolls by itself where the screen is too narrow.

    Args:
        header: Names of the columns, with units.
        rows: As many cells each; the first names the row.
        caption: What it shows.
        text_columns: How many columns, from the left, are words and not numbers.
    """

    def cell(kind: str, number: int, content: Content, **attributes: str) -> Html:
        return tag(kind, content or "", class_=None if number < text_columns else "number", **attributes)

    head = tag("tr", *(cell("th", number, name, scope="col") for number, name in enumerate(header)))
    body = [
        tag("tr", cell("th", 0, row[0], scope="row"), *(cell("td", i, item) for i, item in enumerate(row[1:], start=1)))
        for row in rows
    ]
    written = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    # Reachable by keyboard, since it may have to be scrolled.
    return tag("div", written, class_="table", tabindex="0", role="region", aria_label=caption)


def _attribute(value: str | float | bool) -> str:
    if value is True:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(printable(value))
