"""Read settings from mappings, YAML and `key=value` overrides, with all errors at once, and write them as YAML."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from inline_attention.engine.config.flags import FLAGS
from inline_attention.engine.config.schema import SECTIONS, SETTINGS, TrainConfig
from inline_attention.models.described import ModelDescriptionError, argument_problems, check_model_name
from inline_attention.support.files import read_bounded
from inline_attention.support.settings import BadValueError, shown, unquoted
from inline_attention.support.text import did_you_mean, printable
from inline_attention.support.untrusted import MAX_TEXT_BYTES, UntrustedDataError, load_yaml


@dataclass(frozen=True)
class Problem:
    """A problem with a setting.

    Attributes:
        path: Its dotted name, such as "optimizer.lr".
        message: Expected and actual value, and advice.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """Settings that cannot be used.

    Attributes:
        problems: All problems, not only the first.
        source: Origin of the settings, such as a file name.
        advice: Advice on all problems.
    """

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


def to_mapping(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the settings as nested mappings: section → field → value."""
    return asdict(config)


def from_mapping(
    content: Mapping[Any, Any], *, base: TrainConfig | None = None, source: str = "the configuration"
) -> TrainConfig:
    """Read settings from nested mappings.

    Args:
        content: Section → field → value; what is missing is taken from `base`.
        base: Settings to change; None for the defaults.
        source: Name of `content` in error messages.

    Raises:
        ConfigError: With every unknown name and every bad value.
    """
    base = base or TrainConfig()
    problems: list[Problem] = []
    sections: dict[str, Any] = {name: dict(values) for name, values in to_mapping(base).items()}
    for section, values in content.items():
        if section not in SECTIONS:
            problems.append(Problem(str(section), f"there is no such section{_nearest(str(section))}"))
        elif not isinstance(values, Mapping):
            expected = f"expected a section with {', '.join(_names_in(section))}"
            problems.append(Problem(section, f"{expected}, got {shown(values)}"))
        else:
            for name, value in values.items():
                path = f"{section}.{name}"
                if path not in SETTINGS:
                    problems.append(Problem(path, f"there is no such setting{_nearest(path)}"))
                    continue
                try:
                    sections[section][name] = SETTINGS[path].convert(value)
                except BadValueError as error:
                    problems.append(Problem(path, str(error)))
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
    if len(by_flag or elsewhere) == 1:
        return f"; did you mean {(by_flag or elsewhere)[0]}?"
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
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


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


# PyYAML reads a number with a leading zero as octal.
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _decimal)


def parse_value(text: str) -> Any:
    """Parse one YAML value, such as the right side of an override.

    Raises:
        yaml.YAMLError: If it is no YAML.
        UntrustedDataError: If it is too large, nested too deeply or has a value that cannot be read.
    """
    return load_yaml(text, _StrictLoader)


def from_yaml(text: str, *, base: TrainConfig | None = None, source: str = "the configuration") -> TrainConfig:
    """Read settings from YAML text.

    Args:
        text: Sections with their settings; what is missing is taken from `base`.
        base: Settings to change; None for the defaults.
        source: Name of `text` in error messages.

    Raises:
        ConfigError: If it is no YAML, or with every unknown name and every bad value.
    """
    try:
        content = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", f"it is not valid YAML: {_in_one_line(error)}")], source) from None
    except UntrustedDataError as error:
        raise ConfigError([Problem("", str(error))], source) from None
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ConfigError([Problem("", f"expected sections ({', '.join(SECTIONS)}), got {shown(content)}")], source)
    return from_mapping(content, base=base, source=source)


def read_config(path: str | os.PathLike[str], *, base: TrainConfig | None = None) -> TrainConfig:
    """Read settings from a YAML file, such as a run's `args.yaml`. Arguments and errors: see `from_yaml`."""
    path = Path(path)
    try:
        text = read_bounded(path, MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
        raise ConfigError([Problem("", f"cannot be read: {reason}")], str(path)) from error
    return from_yaml(text, base=base, source=str(path))


def to_yaml(config: TrainConfig, *, header: str = "") -> str:
    """Return all settings as YAML with comments. `from_yaml` reads them back unchanged.

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


def with_overrides(config: TrainConfig, overrides: Iterable[str]) -> TrainConfig:
    """Return a configuration with some settings changed.

    Args:
        config: The settings to start from.
        overrides: `section.field=value` each; later ones win. Numbers, lists and mappings are YAML. Text is taken as
            it is, `#` and blanks included, but for quotes around all of it; `null` stands for nothing where a setting
            allows that. `model.arguments.depth=4` sets one entry of a mapping.

    Raises:
        ConfigError: With everything that is wrong in any of them.
    """
    content: dict[str, Any] = {}
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not path:
            problems.append(Problem("", f"expected key=value, such as optimizer.lr=1e-3, got {override!r}"))
            continue
        try:
            value = _parse(path, text)
        except yaml.YAMLError:
            message = f"expected a value in YAML, such as 0.5, text, null or [1, 2], got {shown(text)}"
            problems.append(Problem(path, message))
            continue
        except UntrustedDataError as error:
            problems.append(Problem(path, f"expected a value in YAML, but {error}"))
            continue
        _assign(content, config, path, value)
    source = "the overrides"
    try:
        changed = from_mapping(content, base=config, source=source)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems], source) from None
    if problems:
        raise ConfigError(problems, source)
    return changed


def _parse(path: str, text: str) -> Any:
    """Read the value of a setting. Text is taken as it is, but for quotes around all of it and `null`."""
    setting = SETTINGS.get(path)
    if setting is None or not setting.is_text:
        return parse_value(text)
    if text == "null" and setting.is_optional:
        return None
    return unquoted(text)


def _assign(content: dict[str, Any], config: TrainConfig, path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    if not name:
        content[section] = value
        return
    field, _, entry = name.partition(".")
    setting = SETTINGS.get(f"{section}.{field}")
    values = content.setdefault(section, {})
    if not isinstance(values, dict):  # "optimizer=adamw" came before, and will be reported
        return
    if not entry or setting is None or not setting.is_mapping:
        values[name] = value
        return
    if not isinstance(values.get(field), dict):
        values[field] = dict(to_mapping(config)[section][field])
    values[field][entry] = value


def check_recipe_file(config: TrainConfig, overrides: Iterable[str], source: str) -> None:
    """Refuse what a stranger's recipe may not set: where to write, what to fetch, where to send, what to build.

    Settings that the command line sets as well are the user's own, and pass.

    Args:
        config: The settings of the file.
        overrides: The command line, as for `with_overrides`.
        source: Name of the file in error messages.

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
    for path, folder, flag in (
        ("run.output", config.run.output, "--output"),
        ("run.experiment", config.run.experiment or "", "--experiment"),
    ):
        if PurePath(folder).is_absolute() or ".." in PurePath(folder).parts or "\\" in folder:
            yield Problem(path, f"a file may name a folder below the current one only, got {folder!r}; pass {flag}")
    if config.run.resume not in (None, "auto"):
        yield Problem("run.resume", f"a file may not name a run to continue, got {config.run.resume!r}; pass --resume")
    if "/" in config.data.dataset and not config.data.dataset.startswith("wds/"):
        message = f"a file may not name data to download, got {config.data.dataset!r}"
        yield Problem("data.dataset", f"{message}; pass --dataset {config.data.dataset}")
    if config.logging.wandb:
        yield Problem("logging.wandb", "a file may not send results to a service; pass --log-wandb")
    try:
        name = check_model_name(config.model.name)
    except ModelDescriptionError as error:
        yield Problem("model.name", str(error))
        return
    for argument, message in argument_problems(name, config.model.arguments).items():
        yield Problem(f"model.arguments.{argument}", message)
