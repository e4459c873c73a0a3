"""Read settings from mappings, YAML and `key=value` overrides, with all errors at once, and write them as YAML."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import yaml

from inline_attention.engine.config.schema import FLAGS, SECTIONS, SETTINGS, TrainConfig
from inline_attention.models.described import ModelDescriptionError, argument_problems, check_model_name
from inline_attention.support.files import read_bounded
from inline_attention.support.settings import BadValueError, ConfigError, Problem, shown, unquoted
from inline_attention.support.text import did_you_mean
from inline_attention.support.untrusted import MAX_TEXT_BYTES, load_yaml


def to_mapping(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the settings as nested mappings: section → field → value."""
    return asdict(config)


def from_mapping(
    content: Mapping[Any, Any],
    *,
    base: TrainConfig | None = None,
    source: str = "the configuration",
    found: Iterable[Problem] = (),
) -> TrainConfig:
    """Read settings from nested mappings: section → field → value; `base` (or defaults) has what is missing.

    `source` is the name of `content` in messages; `found` are problems of it that are known already.

    Raises:
        ConfigError: With these problems, every unknown name and every bad value.
    """
    problems = list(found)
    sections = to_mapping(base or TrainConfig())
    for section, values in content.items():
        if section not in SECTIONS:
            problems.append(Problem(str(section), f"there is no such section{_nearest(str(section))}"))
            continue
        if not isinstance(values, Mapping):
            expected = f"expected a section with {', '.join(_names_in(section))}"
            problems.append(Problem(section, f"{expected}, got {shown(values)}"))
            continue
        for name, value in values.items():
            path = f"{section}.{name}"
            if path not in SETTINGS:
                problems.append(Problem(path, f"there is no such setting{_nearest(path)}"))
                continue
            try:
                sections[section][name] = SETTINGS[path].convert(value)
            except BadValueError as error:
                problems.append(error.problem)
    if problems:
        raise ConfigError(problems, source)
    return TrainConfig(**{name: kind(**sections[name]) for name, kind in SECTIONS.items()})


def _names_in(section: str) -> list[str]:
    return [path.partition(".")[2] for path in SETTINGS if path.startswith(f"{section}.")]


def _nearest(path: str) -> str:
    """A suggestion for an unknown name: timm's word for something, a misplaced or a misspelt one."""
    section, _, name = path.rpartition(".")
    name = name.replace("-", "_")
    by_flag = [flag.setting.path for flag in FLAGS if f"--{name.replace('_', '-')}" in flag.names]
    elsewhere = [known for known in SETTINGS if known.endswith(f".{name}")]
    if found := by_flag[:1] or elsewhere:
        return f"; did you mean {' or '.join(found)}?"
    if section in SECTIONS:
        names = _names_in(section)
        nearest = did_you_mean(name, names).replace("did you mean ", f"did you mean {section}.")
        return nearest or f"; {section} has {', '.join(names)}"
    return did_you_mean(path, [*SECTIONS, *SETTINGS]) or f"; there are {', '.join(SECTIONS)}"


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


# PyYAML reads a number with a leading zero as octal.
_StrictLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def from_yaml(text: str, *, base: TrainConfig | None = None, source: str = "the configuration") -> TrainConfig:
    """Read settings from YAML text, as `from_mapping` reads them from mappings."""
    try:
        content = load_yaml(text, _StrictLoader)
    except ValueError as error:
        raise ConfigError([Problem("", str(error))], source) from None
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise ConfigError([Problem("", f"expected sections ({', '.join(SECTIONS)}), got {shown(content)}")], source)
    return from_mapping(content, base=base, source=source)


def read_config(path: str | os.PathLike[str], *, base: TrainConfig | None = None) -> TrainConfig:
    """Read settings from a YAML file, such as a run's `args.yaml`, with `base` for what is missing."""
    path = Path(path)
    try:
        text = read_bounded(path, MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = (getattr(error, "strerror", None) or error) if is_text else "it is not UTF-8 text"
        raise ConfigError([Problem("", f"cannot be read: {reason}")], str(path)) from error
    return from_yaml(text, base=base, source=str(path))


def to_yaml(config: TrainConfig, *, header: str = "") -> str:
    """Return all settings as YAML with comments, below a header. `from_yaml` reads them back unchanged."""
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
        value, Dumper=_CautiousDumper, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False
    )
    return text.removesuffix("...\n").strip()


def with_overrides(config: TrainConfig, overrides: Iterable[str]) -> TrainConfig:
    """Return settings changed by overrides, `section.field=value` each.

    Later ones win. Numbers, lists and mappings are YAML. Text is taken as it is, `#` and blanks included, but for
    quotes around all of it; `null` stands for nothing where a setting allows that. `model.arguments.depth=4` sets one
    entry of a mapping.

    Raises:
        ConfigError: With everything that is wrong in any of them.
    """
    content: dict[str, Any] = to_mapping(config)
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        section, _, name = path.strip().partition(".")
        field, _, entry = name.partition(".")
        if not equals or not section:
            problems.append(Problem("", f"expected key=value, such as optimizer.lr=1e-3, got {override!r}"))
            continue
        try:
            value = _parse(path.strip(), text)
        except ValueError as error:
            message = f"expected a value in YAML, such as 0.5, null or [1, 2], but {error}"
            problems.append(Problem(path.strip(), message))
            continue
        if not name:
            content[section] = value
        elif isinstance(values := content.setdefault(section, {}), dict):  # else "optimizer=adamw" came before
            if entry and isinstance(values.get(field), dict):
                values[field][entry] = value
            else:
                values[name] = value
    return from_mapping(content, source="the overrides", found=problems)


def _parse(path: str, text: str) -> Any:
    """Read the value of a setting. Text is taken as it is, but for quotes around all of it and `null`."""
    setting = SETTINGS.get(path)
    if setting is None or not setting.is_text:
        return load_yaml(text, _StrictLoader)
    return None if text == "null" and setting.is_optional else unquoted(text)


def check_recipe_file(config: TrainConfig, overrides: Iterable[str], source: str) -> None:
    """Refuse what a stranger's recipe may not set: where to write, what to fetch, where to send, what to build.

    Settings that the command line, `overrides`, sets as well are the user's own, and pass.

    Raises:
        ConfigError: With every setting that is refused.
    """
    own = {override.partition("=")[0].strip() for override in overrides}
    problems = [
        problem
        for problem in _refused_in_files(config)
        if not any(problem.path == path or problem.path.startswith(f"{path}.") for path in own)
    ]
    if problems:
        raise ConfigError(problems, source)


def _refused_in_files(config: TrainConfig) -> Iterator[Problem]:
    for name in ("output", "experiment"):
        folder = getattr(config.run, name) or ""
        if PurePath(folder).is_absolute() or ".." in PurePath(folder).parts or "\\" in folder:
            message = f"a file may name a folder below the current one only, got {folder!r}; pass --{name}"
            yield Problem(f"run.{name}", message)
    if config.run.resume not in (None, "auto"):
        yield Problem("run.resume", f"a file may not name a run to continue, got {config.run.resume!r}; pass --resume")
    if "/" in config.data.dataset and not config.data.dataset.startswith("wds/"):
        message = f"a file may not name data to download, got {config.data.dataset!r}"
        yield Problem("data.dataset", f"{message}; pass --dataset {config.data.dataset}")
    if config.data.allow_outside_files:
        message = "a file may not allow files outside of the data folder; pass --allow-outside-files"
        yield Problem("data.allow_outside_files", message)
    if config.logging.wandb:
        yield Problem("logging.wandb", "a file may not send results to a service; pass --log-wandb")
    try:
        name = check_model_name(config.model.name)
    except ModelDescriptionError as error:
        yield Problem("model.name", str(error))
        return
    for argument, message in argument_problems(name, config.model.arguments).items():
        yield Problem(f"model.arguments.{argument}", message)
