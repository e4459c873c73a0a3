"""Parse JSON and YAML from strangers: bounded in size, depth and digits, with one kind of error.

Parsers here return plain data: dicts, lists, strings, numbers, booleans and None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

MAX_DEPTH = 50
MAX_TEXT_BYTES = 2**20


class UntrustedDataError(ValueError):
    """A text is malformed, too large or too deeply nested. The message is one sentence without the text's name."""


def parse_json(text: str | bytes, *, max_bytes: int = MAX_TEXT_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Parse JSON.

    Args:
        text: The whole document.
        max_bytes: Longest text accepted.
        max_depth: Deepest nesting accepted.

    Raises:
        UntrustedDataError: If it is not JSON, or exceeds a bound.
    """
    if len(text) > max_bytes:
        raise UntrustedDataError(f"it has {len(text):,} bytes, more than {max_bytes:,}")
    try:
        content = json.loads(text)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:  # malformed, not UTF-8, or a number with thousands of digits
        raise UntrustedDataError(f"it is not valid JSON: {error}") from None
    check_depth(content, max_depth)
    return content


def check_depth(content: object, max_depth: int = MAX_DEPTH) -> None:
    """Raise `UntrustedDataError` if dicts and lists are nested more than `max_depth` deep."""
    level: list[object] = [content]
    for _ in range(max_depth + 1):
        level = [item for parent in level for item in _children(parent)]
        if not level:
            return
    raise _too_deep(max_depth)


def load_yaml(
    text: str, loader: type[yaml.SafeLoader], *, max_bytes: int = MAX_TEXT_BYTES, max_depth: int = MAX_DEPTH
) -> Any:
    """Parse YAML with a safe loader, after a look at its nesting.

    Args:
        text: The whole document.
        loader: `yaml.SafeLoader` or a subclass.
        max_bytes: Longest text accepted.
        max_depth: Deepest nesting accepted.

    Raises:
        UntrustedDataError: If it exceeds a bound, or has an alias, a tag or a number that cannot be built.
        yaml.YAMLError: If it is not YAML.
    """
    if len(text) > max_bytes:
        raise UntrustedDataError(f"it has {len(text):,} characters, more than {max_bytes:,}")
    depth = 0
    for event in yaml.parse(text, Loader=loader):  # the event parser does not recurse
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > max_depth:
                raise _too_deep(max_depth)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=event.start_mark)
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # such as a number of 10,000 digits
        raise UntrustedDataError(f"it has a value that cannot be read: {error}") from None


def _children(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _too_deep(max_depth: int) -> UntrustedDataError:
    return UntrustedDataError(f"it is nested more than {max_depth} deep")
