"""From nested mappings, as a YAML file holds them, to a configuration: with all errors at once, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from inline_attention.engine.config.flags import FLAGS
from inline_attention.engine.config.schema import TrainConfig
from inline_attention.engine.config.settings import SECTIONS, SETTINGS, BadValueError, did_you_mean, shown
from inline_attention.support.text import printable


@dataclass(frozen=True)
class Problem:
    """What is wrong with a setting.

    Attributes:
        path: Its dotted name, such as "optimizer.lr".
        message: What was expected, what came, what to do.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """Settings that cannot be used.

    Attributes:
        problems: Everything that is wrong, not the first thing only.
        source: Where the settings came from, such as a file.
        advice: What to do about all of it.
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
    """The settings as nested mappings: section → field → value."""
    return asdict(config)


def from_mapping(
    content: Mapping[Any, Any], *, base: TrainConfig | None = None, source: str = "the configuration"
) -> TrainConfig:
    """Read settings from nested mappings.

    Args:
        content: Section → field → value; what is missing is taken from `base`.
        base: Settings to start from; the defaults if None.
        source: What error messages call `content`.

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
        return did_you_mean(name, names, prefix=f"{section}.") or f"; {section} has {', '.join(names)}"
    return did_you_mean(path, [*SECTIONS, *SETTINGS]) or f"; there are {', '.join(SECTIONS)}"
