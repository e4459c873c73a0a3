"""Changes to a configuration as they are written on a command line: `optimizer.lr=1e-3`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import yaml

from inline_attention.engine.config.parsing import ConfigError, Problem, from_mapping, to_mapping
from inline_attention.engine.config.schema import TrainConfig
from inline_attention.engine.config.settings import SETTINGS, shown, unquoted
from inline_attention.engine.config.yaml_text import parse_value
from inline_attention.models.described import ModelDescriptionError, argument_problems, check_model_name
from inline_attention.support.untrusted import UntrustedDataError


def with_overrides(config: TrainConfig, overrides: Iterable[str]) -> TrainConfig:
    """A configuration with some settings changed.

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
        source: What error messages call the file.

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
