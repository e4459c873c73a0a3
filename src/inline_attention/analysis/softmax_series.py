"""The picture of docs/math.md, section 8: softmax, InLine and linear attention as scores grow, by distribution of keys.

Shapes: `M` keys of one channel, `Q` queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from inline_attention.ops.api import inline_attention
from inline_attention.support.figures import KIND_LABELS, Axes, Chart, LegendEntry, Panel, Style, draw_line, light_grid

KEYS = 200_000
LARGEST_SCORE = 2.0  # standard deviations
QUERIES = 41
TITLE = "InLine attention is softmax attention, cut after the second cumulant"
SMALL_PRINT = (
    f"{KEYS:,} keys with mean 0 and variance 1, drawn with a seed; the value of a key is the key itself. The query "
    "sets the size of the scores. InLine's output is the covariance term, a straight line. For Gaussian keys softmax "
    "is the same line, up to sampling; bounded keys bend it down (tanh), skewed keys up. Linear attention has ReLU "
    "features."
)
# Keys from Gaussian noise and uniform numbers, all with mean 0 and variance 1.
DISTRIBUTIONS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "Gaussian keys": lambda generator: torch.randn(KEYS, generator=generator, dtype=torch.float64),
    "keys of two values, ±1": lambda generator: (
        torch.randint(2, (KEYS,), generator=generator).to(torch.float64) * 2 - 1
    ),
    "skewed keys (gamma)": lambda generator: _gamma_keys(generator),
}
# Softmax is drawn last and dashed, so that a line below it can be seen.
STYLES = {"inline": Style("inline"), "linear": Style("linear"), "softmax": Style("softmax", 1)}
SHAPE = 8  # of the gamma distribution: the sum of so many exponential numbers


def _gamma_keys(generator: torch.Generator) -> Tensor:
    uniform = torch.rand(SHAPE, KEYS, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    return (-uniform.log().sum(0) - SHAPE) / math.sqrt(SHAPE)


@dataclass(frozen=True)
class SeriesCurves:
    """Outputs of one distribution of keys by the standard deviation of scores."""

    keys: str
    sizes: tuple[float, ...]
    outputs: dict[str, tuple[float, ...]]  # by kind of attention


def measure_series(seed: int = 0) -> list[SeriesCurves]:
    """Return the outputs of all attentions for every distribution; the size of scores is that of the query."""
    curves: list[SeriesCurves] = []
    sizes = torch.linspace(0, LARGEST_SCORE, QUERIES, dtype=torch.float64)
    for name, draw in DISTRIBUTIONS.items():
        keys = draw(torch.Generator().manual_seed(seed))
        q, k, v = sizes.view(1, -1, 1, 1), keys.view(1, -1, 1, 1), keys.view(1, -1, 1, 1)
        outputs = {
            "inline": inline_attention(q, k, v, scale=1.0).flatten(),
            "linear": inline_attention(q, k, v, scale=1.0, normalization="divide", feature_map="relu").flatten(),
            "softmax": torch.stack([(size * keys).softmax(0) @ keys for size in sizes]),
        }
        plain = {kind: tuple(values.tolist()) for kind, values in outputs.items()}
        curves.append(SeriesCurves(name, tuple(sizes.tolist()), plain))
    return curves


def series_chart(curves: Sequence[SeriesCurves]) -> Chart:
    """Return a panel per distribution of keys."""

    def draw(axes: Axes, item: SeriesCurves) -> None:
        for kind, values in item.outputs.items():
            points = zip(item.sizes, values, strict=True)
            draw_line(axes, STYLES[kind], [place for place in points if kind != "linear" or place[0] > 0])
        axes.set(xlabel="standard deviation of the scores", ylabel="output", ylim=(0, 1.5 * LARGEST_SCORE))
        light_grid(axes)

    panels = [Panel(item.keys, partial(draw, item=item), f"Outputs by size of scores, {item.keys}.") for item in curves]
    return Chart(panels, [LegendEntry(KIND_LABELS[kind], STYLES[kind]) for kind in curves[0].outputs])


def draw_series(curves: Sequence[SeriesCurves], path: Path) -> None:
    """Write a PNG."""
    series_chart(curves).save(path.parent, path.stem, title=TITLE, small_print=SMALL_PRINT, formats=("png",))
