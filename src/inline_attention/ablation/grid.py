"""The grid of an ablation: the axes, and a recipe's settings for every combination of their values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inline_attention.engine.config import ModelSection, TrainConfig, check
from inline_attention.models.registry import ATTENTIONS
from inline_attention.ops.feature_maps import FEATURE_MAPS
from inline_attention.ops.validation import NORMALIZATIONS
from inline_attention.support.text import did_you_mean


class AxisError(ValueError):
    """An axis does not exist, or cannot take a value."""


@dataclass(frozen=True)
class Axis:
    """A setting that can be varied."""

    values: tuple[Any, ...]  # by default
    applied: Callable[[ModelSection, Any], ModelSection]  # returns the model's settings with a value
    lacks: tuple[str, ...] = ()  # starts of the names of models that do not have it
    known: tuple[str, ...] = ()  # all possible values, if they have names

    def parse(self, text: str) -> Any:
        """Parse a value; `ValueError` if it has another type than the default ones, or is not a known name."""
        if self.known and text not in self.known:
            raise ValueError(f"expected one of {', '.join(self.known)}")
        if isinstance(self.values[0], bool):
            if text not in ("true", "false"):
                raise ValueError("expected true or false")
            return text == "true"
        return type(self.values[0])(text)


def _with_argument(model: ModelSection, name: str, value: Any) -> ModelSection:
    return replace(model, arguments={**model.arguments, name: value})


def _layer_axis(name: str, *values: Any, lacks: tuple[str, ...], known: tuple[str, ...] = ()) -> Axis:
    def applied(model: ModelSection, value: Any) -> ModelSection:
        options = model.arguments.get("attention_options") or {}
        return _with_argument(model, "attention_options", {**options, name: value})

    return Axis(values, applied, lacks, known)


def _with_heads(model: ModelSection, heads: int) -> ModelSection:
    # Pyramids have a number per stage, which doubles with the channels.
    value = heads if "_deit_" in model.name else tuple(heads * 2**stage for stage in range(4))
    return _with_argument(model, "num_heads", value)


def _with_attention(model: ModelSection, attention: str) -> ModelSection:
    _, separator, rest = model.name.partition("_")
    return replace(model, name=f"{attention}{separator}{rest}")


AXES: Mapping[str, Axis] = {
    "feature_map": _layer_axis(
        "feature_map", "identity", "relu", "leaky_relu", "exp", lacks=("softmax_",), known=tuple(FEATURE_MAPS)
    ),
    "normalization": _layer_axis("normalization", "divide", "subtract", lacks=("softmax_",), known=NORMALIZATIONS),
    # Softmax twins of the other families attend in windows or stripes.
    "local_residual": _layer_axis("local_residual", True, False, lacks=("softmax_swin_", "softmax_cswin_")),
    "window": Axis((7, 14, 28), lambda model, side: _with_argument(model, "window_size", side)),
    "heads": Axis((1, 2, 4, 8), _with_heads),
    "attention": Axis(ATTENTIONS, _with_attention, known=ATTENTIONS),
}


@dataclass(frozen=True)
class Cell:
    """One combination of values, by axis, and the recipe's settings with them."""

    values: Mapping[str, Any]
    config: TrainConfig
    problem: str | None = None  # why it cannot be trained

    @property
    def name(self) -> str:
        """The values as a file name."""
        return "_".join(f"{axis}-{shown(value)}" for axis, value in self.values.items())

    @property
    def label(self) -> str:
        """The values as text."""
        words = []
        for axis, value in self.values.items():
            name = axis.replace("_", " ")
            if isinstance(value, bool):
                words.append(name if value else f"no {name}")
            else:
                words.append(f"{name} {value}" if isinstance(value, int) else str(value))
        return ", ".join(words)

    def run(self, output: str, seed: int) -> TrainConfig:
        """Return the settings of the run with one seed, in its own folder."""
        config = self.config
        return replace(
            config,
            run=replace(config.run, output=output, experiment=f"{self.name}_seed-{seed}"),
            training=replace(config.training, seed=seed),
        )


def shown(value: Any) -> str:
    """Return a value as written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return an axis and its values from `NAME` or `NAME=VALUE,VALUE`; raise `AxisError` if that is not possible."""
    name, equals, listed = text.partition("=")
    if name not in AXES:
        raise AxisError(f"--axis must be one of {', '.join(AXES)}, got {name!r}{did_you_mean(name, AXES)}")
    axis = AXES[name]
    if not equals:
        return name, axis.values
    values = []
    for part in map(str.strip, listed.split(",")):
        try:
            values.append(axis.parse(part))
        except ValueError as error:
            example = ",".join(map(shown, axis.values))
            raise AxisError(f"{name} cannot be {part!r} ({error}); for example {name}={example}") from error
    return name, tuple(dict.fromkeys(values))


def grid(config: TrainConfig, axes: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Return every combination of the axes' values; the first axis varies slowest."""
    return [cell(config, dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*axes.values())]


def cell(config: TrainConfig, values: Mapping[str, Any]) -> Cell:
    """Return one combination, checked by building its model on the meta device."""
    model = config.model
    for axis, value in values.items():
        model = AXES[axis].applied(model, value)
    changed = replace(config, model=model)
    return Cell(values, changed, _problem(changed, values))


def _problem(config: TrainConfig, values: Mapping[str, Any]) -> str | None:
    name = config.model.name
    attention, _, family = name.partition("_")
    if "window" in values and attention in ATTENTIONS and not family.startswith("swin_"):
        return f"{name} has no windows, which only swin models have"
    if without_effect := [axis for axis in values if name.startswith(AXES[axis].lacks)]:
        return f"{name} has no {' and no '.join(without_effect)}"
    # Problems with the data are the same for all cells, and training reports them.
    problems = [problem for problem in check(config) if problem.path.startswith("model.")]
    return "; ".join(problem.message for problem in problems) or None
