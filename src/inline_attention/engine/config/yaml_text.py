"""Configurations as YAML: read strictly, written with the documentation of each setting above it."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from inline_attention.engine.config.parsing import ConfigError, Problem, from_mapping, to_mapping
from inline_attention.engine.config.schema import TrainConfig
from inline_attention.engine.config.settings import SECTIONS, SETTINGS, shown
from inline_attention.support.files import read_bounded
from inline_attention.support.untrusted import MAX_TEXT_BYTES, UntrustedDataError, load_yaml

WIDTH = 100


class _StrictLoader(yaml.SafeLoader):
    """Plain values as YAML 1.2 has them: 1e-3 is a number, `off` and `no` are text. No aliases, no double keys."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - PyYAML's own way: one table per class

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused by PyYAML
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands here twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _CautiousDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would take for something else ("off", "1e3"): any program reads it alike."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML loses some line breaks (U+0085) unless they are escaped.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_CautiousDumper.add_representer(str, _CautiousDumper.represent_str)
for _tag, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", [*"nN~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)", [*"-+.0123456789"]),
):
    for _class in (_StrictLoader, _CautiousDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


# PyYAML reads a number with a leading zero as octal.
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _decimal)


def parse_value(text: str) -> Any:
    """One YAML value, such as the right side of an override.

    Raises:
        yaml.YAMLError: If it is no YAML.
        UntrustedDataError: If it is too large, nested too deeply or has a value that cannot be read.
    """
    return load_yaml(text, _StrictLoader)


def from_yaml(text: str, *, base: TrainConfig | None = None, source: str = "the configuration") -> TrainConfig:
    """Read settings from YAML text.

    Args:
        text: Sections with their settings; what is missing is taken from `base`.
        base: Settings to start from; the defaults if None.
        source: What error messages call `text`.

    Raises:
        ConfigError: If it is no YAML, or with every unknown name and every bad value.
    """
    try:
        content = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", f"it is no valid YAML: {_in_one_line(error)}")], source) from None
    except UntrustedDataError as error:
        raise ConfigError([Problem("", str(error))], source) from None
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ConfigError([Problem("", f"expected sections ({', '.join(SECTIONS)}), got {shown(content)}")], source)
    return from_mapping(content, base=base, source=source)


def read_config(path: str | os.PathLike[str], *, base: TrainConfig | None = None) -> TrainConfig:
    """Read settings from a YAML file, such as the `args.yaml` of a run. Arguments and errors: see `from_yaml`."""
    path = Path(path)
    try:
        text = read_bounded(path, MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
        raise ConfigError([Problem("", f"cannot be read: {reason}")], str(path)) from error
    return from_yaml(text, base=base, source=str(path))


def to_yaml(config: TrainConfig, *, header: str = "") -> str:
    """All settings as YAML, each below its documentation; `from_yaml` gives them back as they are.

    Args:
        config: The settings.
        header: Text for a comment at the top.
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for section, values in to_mapping(config).items():
        summary = (SECTIONS[section].__doc__ or "").strip()
        lines += ["", *_comment(summary, ""), f"{section}:"]
        for name, value in values.items():
            setting = SETTINGS[f"{section}.{name}"]
            lines += [*_comment(setting.documentation, "  "), f"  {name}: {_value_text(value)}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _value_text(value: Any) -> str:
    text = yaml.dump(
        _with_lists(value),
        Dumper=_CautiousDumper,
        default_flow_style=True,
        allow_unicode=True,
        width=10**6,  # one line
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()


def _with_lists(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_with_lists(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _with_lists(item) for key, item in value.items()}
    return value


def _in_one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    return f"{getattr(error, 'problem', None) or error}{where}"
