"""Queries constructed to collide in linear attention, whose weights depend only on the direction of phi(q).

Shapes: `N` queries, `M` keys, all in the plane (head dim 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from inline_attention.ops import attention_weights
from inline_attention.ops.reference import AttentionKind
from inline_attention.support.figures import (
    ALARM,
    FAINT,
    INK,
    KIND_LABELS,
    LIGHT,
    MUTED,
    PAPER,
    Axes,
    light_grid,
    new_figure,
    save,
)

KINDS: tuple[AttentionKind, ...] = ("softmax", "linear", "inline")
# Weights are float64 and of order one: rounding stays below 1e-14, and what these cases tell apart differs by 1e-2.
COLLISION_TOLERANCE = 1e-9

QUERY_COLORS = ("#b5b5bd", "#85858f", "#55555e", INK)  # no colors: those are reserved for the attentions
QUERY_MARKERS = ("o", "s", "^", "D")
QUERY_NAMES = ("q₁", "q₂", "q₃", "q₄")

TITLE = "Linear attention cannot tell these queries apart; softmax and InLine can"
CAPTION = (
    "Linear attention divides the scores of a query by their sum, so only the direction of φ(q) matters, and that is "
    "the same all along the gray line. A bias does not help: the line starts at −A⁻¹b instead of the origin. InLine "
    "subtracts the mean score instead; its weights may be negative and sum to one as well. Linear and InLine use the φ "
    "named on the left; softmax has none."
)
# Name, phi, A, b, the first query, and the factors between its features A q + b and those of all queries.
CASES: tuple[Any, ...] = (
    ("one ray", "relu(x)", ((1, 0), (0, 1)), (0, 0), (0.5, 0.25), (1.0, 2.4, 4.0, 6.0)),
    ("different rays", "relu(Ax + b)", ((1.0, 0.2), (0.6, 1.0)), (0.84, -1.08), (-0.4, 1.6), (1.0, 1.8, 2.8, 4.0)),
)
KEYS = ((2.6, 0.4), (2.3, 1.7), (1.4, 2.0), (0.8, 2.5), (0.1, 2.2), (0.4, 0.9))


@dataclass(frozen=True)
class CollisionCase:
    """Queries with parallel features, and the keys they attend to, in float64."""

    name: str
    feature_map_name: str
    matrix: torch.Tensor  # A of phi(x) = relu(Ax + b), [2, 2], invertible
    bias: torch.Tensor  # b, [2]
    keys: torch.Tensor  # [M, 2]
    queries: torch.Tensor  # [N, 2], pairwise different, with phi(q) > 0 and parallel

    @property
    def apex(self) -> torch.Tensor:
        """The point `[2]` with Ax + b = 0, where the rays of colliding queries start."""
        return -torch.linalg.solve(self.matrix, self.bias)

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        """Return phi(x) = relu(Ax + b) of `[..., 2]`."""
        return torch.relu(x @ self.matrix.T + self.bias)


class InjectivityResult(NamedTuple):
    """The weights that one attention gives to the queries of one case."""

    case: CollisionCase
    kind: AttentionKind  # "linear" and "inline" use the phi of the case; softmax has none
    weights: torch.Tensor  # [N, M]; rows sum to one
    largest_difference: float  # max |Δw| of the pair of queries that differs most
    smallest_difference: float  # max |Δw| of the pair of queries that differs least

    @property
    def feature_map_name(self) -> str:
        """Formula of the phi of these weights."""
        return "none" if self.kind == "softmax" else self.case.feature_map_name

    @property
    def verdict(self) -> Literal["collide", "distinct"]:
        """ "distinct" when every two queries differ by more than `COLLISION_TOLERANCE`, "collide" otherwise."""
        return "distinct" if self.smallest_difference > COLLISION_TOLERANCE else "collide"


def measure_injectivity() -> list[InjectivityResult]:
    """Return the weights of softmax, linear and InLine attention in both cases; deterministic."""
    results = []
    for case, kind in itertools.product(collision_cases(), KINDS):
        feature_map = "identity" if kind == "softmax" else case.feature_map
        q, k = case.queries[None, :, None], case.keys[None, :, None]  # [1, N, 1, 2], [1, M, 1, 2]
        weights = attention_weights(q, k, kind=kind, feature_map=feature_map)[0, 0]
        differences = torch.pdist(weights, p=torch.inf)  # one per pair of queries
        results.append(InjectivityResult(case, kind, weights, differences.max().item(), differences.min().item()))
    return results


def collision_cases() -> list[CollisionCase]:
    """Return queries on a ray from the origin for relu(x), and queries on different rays for relu(Ax + b)."""
    cases = []
    for name, formula, *numbers in CASES:
        matrix, bias, first_query, factors = (torch.tensor(values, dtype=torch.float64) for values in numbers)
        features = factors[:, None] * (matrix @ first_query + bias)
        assert (features > 0).all()  # where relu clips, it would bend the line of solutions
        queries = torch.linalg.solve(matrix, (features - bias).T).T
        keys = torch.tensor(KEYS, dtype=torch.float64)
        cases.append(CollisionCase(name, formula, matrix, bias, keys, queries))
    return cases


def draw_collision_cases(results: Sequence[InjectivityResult], path: Path) -> None:
    """Write a PNG with one row per case: the plane with keys and queries, then the weights under each attention."""
    rows = [list(group) for _, group in itertools.groupby(results, key=lambda result: result.case.name)]
    with new_figure(12.5, 3.3 * len(rows) + 1.2, TITLE, CAPTION) as figure:
        grid = {"width_ratios": (1.1, *(1.0 for _ in rows[0])), "hspace": 0.1}
        panels = figure.subplots(len(rows), 1 + len(rows[0]), squeeze=False, gridspec_kw=grid)
        for axes in panels[:, 1:].flat[1:]:
            axes.sharey(panels[0, 1])  # so that bars can be compared across panels
        for row, (plane, first, *others) in zip(rows, panels, strict=True):
            _draw_plane(plane, row[0].case)
            for axes, result in zip((first, *others), row, strict=True):
                _draw_weights(axes, result)
                axes.tick_params(labelleft=axes is first)
            first.set_ylabel("attention weight")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper right", ncols=8, fontsize=10.5, handletextpad=0.1, columnspacing=1.0
        )
        save(figure, path.parent, path.stem, ("png",))


def draw_two_queries(results: Sequence[InjectivityResult], path: Path) -> None:
    """Write a PNG for narrow screens: the weights of two queries on one ray, a panel per attention.

    Bars are in the attention's color, as in the report: filled for the first query, hollow for the second.
    """
    from matplotlib.patches import Patch

    shown, pair = results[: len(KINDS)], (0, 2)
    first, second = (shown[0].case.queries[number].norm() for number in pair)
    note = (
        f"Weights of six keys. The second query is {second / first:.0f} times the first. Linear attention divides by "
        "the sum of the scores, so the length of a query is lost; InLine subtracts their mean. φ is ReLU."
    )
    with new_figure(4.6, 6.6, "Two queries on one ray", note) as figure:
        panels = figure.subplots(len(shown), 1, sharex=True, sharey=True)
        for axes, result in zip(panels, shown, strict=True):
            color = LIGHT[result.kind]
            one, other = (result.weights[number] for number in pair)
            for weights, shift, face in ((one, -0.2, color), (other, 0.2, PAPER)):
                places = [key + shift for key in range(1, len(weights) + 1)]
                axes.bar(places, weights.tolist(), 0.34, facecolor=face, edgecolor=color, linewidth=1.8)
            axes.axhline(0, color=INK, linewidth=0.9)
            light_grid(axes)
            axes.spines["bottom"].set_visible(False)
            is_same = (one - other).abs().max() <= COLLISION_TOLERANCE
            statement = "the same weights for both" if is_same else "different weights"
            name = KIND_LABELS[result.kind]
            title = f"{name[0].upper()}{name[1:]}: {statement}"
            axes.set_title(title, fontsize=12, fontweight="bold", color=ALARM if is_same else INK)
        panels[-1].set(xticks=range(1, len(KEYS) + 1), xlabel="key")
        handles = [Patch(facecolor=face, edgecolor=INK) for face in (INK, PAPER)]
        panels[0].legend(handles, ["first query", "second query"], loc="upper right", fontsize=11)
        save(figure, path.parent, path.stem, ("png",))


def _draw_plane(axes: Axes, case: CollisionCase) -> None:
    keys, queries, (apex_x, apex_y) = case.keys.tolist(), case.queries.tolist(), case.apex.tolist()
    starts_at_origin = apex_x == apex_y == 0
    axes.spines["left"].set_visible(True)
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    end_x, end_y = (case.apex + 1.1 * (case.queries[-1] - case.apex)).tolist()
    axes.plot((apex_x, end_x), (apex_y, end_y), color=FAINT, linewidth=5, solid_capstyle="round", zorder=1)
    if not starts_at_origin:
        for x, y in queries:
            axes.plot((0, x), (0, y), color=MUTED, linewidth=0.9, linestyle=(0, (2, 2.5)), zorder=1)
    axes.scatter(*zip(*keys, strict=True), s=150, facecolor="white", edgecolor=MUTED, zorder=2, label="keys")
    for number, (x, y) in enumerate(keys, start=1):
        axes.text(x, y, str(number), ha="center", va="center_baseline", fontsize=8.5, zorder=3)
    for (x, y), marker, color, name in zip(queries, QUERY_MARKERS, QUERY_COLORS, QUERY_NAMES, strict=True):
        axes.scatter(x, y, s=58, marker=marker, color=color, zorder=4, label=name)
        axes.annotate(name, (x, y), (-5, 9), textcoords="offset points", fontsize=12, fontstyle="italic")
    axes.scatter(apex_x, apex_y, s=60, marker="x", linewidth=2, color=INK, zorder=3)
    start = "origin" if starts_at_origin else "−A⁻¹b"
    axes.annotate(start, (apex_x, apex_y), (0, -16), textcoords="offset points", ha="center", fontsize=10)
    axes.margins(0.12, 0.18)
    axes.set(xlabel="channel 1", ylabel="channel 2")
    where = "on one ray from the origin" if starts_at_origin else "on different rays from the origin"
    _title(axes, f"φ(x) = {case.feature_map_name}", f"{len(queries)} queries {where}", INK)


def _draw_weights(axes: Axes, result: InjectivityResult) -> None:
    queries, keys = result.weights.shape
    width = 0.8 / queries
    for number, weights in enumerate(result.weights):
        positions = torch.arange(1, keys + 1) + (number - (queries - 1) / 2) * width
        axes.bar(positions.tolist(), weights.tolist(), width, color=QUERY_COLORS[number])
    axes.axhline(0, color=INK, linewidth=0.9)
    light_grid(axes)
    axes.spines["bottom"].set_visible(False)
    axes.set(xticks=range(1, keys + 1), xlabel="key")
    name = KIND_LABELS[result.kind]
    statement = "every query gets its own weights"
    if result.verdict == "collide":
        all_same = result.largest_difference <= COLLISION_TOLERANCE
        statement = f"{f'all {queries}' if all_same else 'some'} queries get the same weights"
    _title(axes, name[0].upper() + name[1:], statement, INK if result.verdict == "distinct" else ALARM)


def _title(axes: Axes, name: str, statement: str, color: str) -> None:
    axes.set_title(statement, fontsize=10, color=color)
    axes.annotate(name, (0, 1), (0, 24), "axes fraction", "offset points", fontsize=12.5, fontweight="bold")
