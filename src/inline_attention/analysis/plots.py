"""Pictures of what the other modules of this package measured. The only module here that needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from inline_attention.analysis.injectivity import COLLISION_TOLERANCE, CollisionCase, InjectivityResult
from inline_attention.benchmark.cost import ATTENTIONS, HEAD_DIM, HEADS, REPEATS, CostPoint
from inline_attention.support.figures import (
    ALARM,
    DOTS_PER_INCH,
    FAINT,
    INK,
    KIND_COLORS,
    KIND_MARKERS,
    LINE,
    MUTED,
    STYLE,
)

# Okabe and Ito's palette: told apart with every common form of color blindness.
QUERY_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
QUERY_MARKERS = ("o", "s", "^", "D")
KIND_TITLES = {"softmax": "Softmax", "linear": "Linear", "inline": "InLine"}
KEY_MARKER = {"s": 150, "facecolor": "white", "edgecolor": MUTED}
INJECTIVITY_CAPTION = (
    "Linear attention divides the scores of a query by their sum, so only the direction of φ(q) counts, "
    "and that is the same all along the grey line.\n"
    "A bias does not help: the line merely starts at −A⁻¹b in place of the origin. InLine subtracts the mean score "
    "instead; its weights may be negative\n"
    "and sum to one as well. Linear and InLine use the φ named on the left; softmax has none."
)


def draw_injectivity(results: Sequence[InjectivityResult], path: Path) -> None:
    """Draw one row per case: the plane with keys and queries, then the weights under each attention.

    Args:
        results: Of `measure_injectivity`: cases in the outer loop.
        path: The PNG to write.
    """
    rows = [list(group) for _, group in itertools.groupby(results, key=lambda result: result.case.name)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 3.3 * len(rows) + 1.2))
        vertical = {"top": 0.85, "bottom": 0.145, "hspace": 0.55}
        planes = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"left": 0.045, "right": 0.28, **vertical})
        # One scale everywhere: bars may be compared across panels.
        panels = figure.subplots(
            len(rows), len(rows[0]), squeeze=False, sharey=True,
            gridspec_kw={"left": 0.345, "right": 0.99, "wspace": 0.1, **vertical},
        )  # fmt: skip
        for row, plane, row_panels in zip(rows, planes[:, 0], panels, strict=True):
            _draw_plane(plane, row[0].case)
            for axes, result in zip(row_panels, row, strict=True):
                _draw_weights(axes, result)
            row_panels[0].set_ylabel("attention weight")
        figure.legend(
            handles=_query_and_key_handles(len(rows[0][0].weights)), loc="upper right", bbox_to_anchor=(0.995, 0.997),
            ncols=8, fontsize=10.5, handletextpad=0.3, columnspacing=1.3,
        )  # fmt: skip
        _headline(figure, "Linear attention cannot tell these queries apart; softmax and InLine can")
        figure.text(0.012, 0.012, INJECTIVITY_CAPTION, fontsize=9, color=MUTED, linespacing=1.5)
        _save(figure, path)


def draw_cost(points: Sequence[CostPoint], machine: str, path: Path) -> None:
    """Draw time and peak memory against the number of tokens, both on logarithmic axes.

    Args:
        points: Of `measure_attention_cost`.
        machine: Of `describe_machine`, for the small print.
        path: The PNG to write.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 5.8))
        time_axes, memory_axes = figure.subplots(
            1, 2, gridspec_kw={"left": 0.05, "right": 0.955, "top": 0.86, "bottom": 0.22, "wspace": 0.22}
        )
        _draw_against_tokens(time_axes, points, lambda point: point.milliseconds)
        _draw_against_tokens(memory_axes, points, lambda point: _mebibytes(point.peak_bytes))
        time_axes.set_title("Time of one forward call (ms)", fontsize=11, fontweight="bold")
        memory_axes.set_title("Peak memory on top of the input (MiB)", fontsize=11, fontweight="bold")
        _headline(figure, "What attention over one image costs")
        figure.text(0.012, 0.02, _cost_caption(points, machine), fontsize=8.5, color=MUTED, linespacing=1.5)
        _save(figure, path)


def _draw_plane(axes: Axes, case: CollisionCase) -> None:
    keys, queries, (apex_x, apex_y) = case.keys.tolist(), case.queries.tolist(), case.apex.tolist()
    starts_at_origin = apex_x == apex_y == 0
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    end = [start + 1.1 * (query - start) for start, query in zip(case.apex.tolist(), queries[-1], strict=True)]
    axes.plot((apex_x, end[0]), (apex_y, end[1]), color=LINE, linewidth=5, solid_capstyle="round", zorder=1)
    if not starts_at_origin:
        for x, y in queries:
            axes.plot((0, x), (0, y), color=MUTED, linewidth=0.9, linestyle=(0, (2, 2.5)), zorder=1)
    axes.scatter(*zip(*keys, strict=True), **KEY_MARKER, zorder=2)
    for number, (x, y) in enumerate(keys, start=1):
        axes.text(x, y, str(number), ha="center", va="center_baseline", fontsize=8.5, zorder=3)
    for number, (x, y) in enumerate(queries):
        axes.scatter(x, y, s=58, marker=QUERY_MARKERS[number], color=QUERY_COLORS[number], zorder=4)
        axes.annotate(f"$q_{number + 1}$", (x, y), (-5, 9), textcoords="offset points", fontsize=12)
    axes.scatter(apex_x, apex_y, s=60, marker="x", linewidth=2, color=INK, zorder=3)
    start = "origin" if starts_at_origin else "$-A^{-1}b$"
    axes.annotate(start, (apex_x, apex_y), (0, -16), textcoords="offset points", ha="center", fontsize=10)
    axes.margins(0.12, 0.18)
    axes.set(xlabel="channel 1", ylabel="channel 2")
    where = "on one ray from the origin" if starts_at_origin else "on different rays from the origin"
    _title(axes, f"φ(x) = {case.feature_map_name}", f"{len(queries)} queries {where}", INK)


def _draw_weights(axes: Axes, result: InjectivityResult) -> None:
    queries, keys = result.weights.shape
    width = 0.8 / queries
    for number, weights in enumerate(result.weights.tolist()):
        positions = [key + (number - (queries - 1) / 2) * width for key in range(1, keys + 1)]
        axes.bar(positions, weights, width, color=QUERY_COLORS[number])
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks(range(1, keys + 1))
    axes.tick_params(axis="both", length=0)
    axes.set_xlabel("key")
    if result.verdict == "distinct":
        statement, color = "every query gets its own weights", INK
    elif result.largest_difference <= COLLISION_TOLERANCE:
        statement, color = f"all {queries} queries get the same weights", ALARM
    else:
        statement, color = "some queries get the same weights", ALARM
    _title(axes, KIND_TITLES[result.kind], statement, color)


def _query_and_key_handles(queries: int) -> list[Line2D]:
    handles = [
        Line2D([], [], linestyle="", markersize=8, marker=QUERY_MARKERS[i], color=QUERY_COLORS[i], label=f"$q_{i + 1}$")
        for i in range(queries)
    ]
    key = Line2D([], [], linestyle="", markersize=11, marker="o", color=MUTED, markerfacecolor="white", label="keys")
    return [*handles, key]


def _draw_against_tokens(
    axes: Axes, points: Sequence[CostPoint], value_of: Callable[[CostPoint], float | None]
) -> None:
    measured = [(point.kind, point.tokens, value) for point in points if (value := value_of(point))]
    axes.set(xscale="log", yscale="log", xlabel="tokens N")
    if not measured:
        axes.text(0.5, 0.5, "not available on this platform", transform=axes.transAxes, ha="center", color=MUTED)
        return
    for kind, attention in ATTENTIONS.items():
        tokens = [size for measured_kind, size, _ in measured if measured_kind == kind]
        values = [value for measured_kind, _, value in measured if measured_kind == kind]
        axes.plot(
            tokens, values, linewidth=2.2, markersize=7,
            color=KIND_COLORS[kind], marker=KIND_MARKERS[kind], label=attention.label,
        )  # fmt: skip
    sizes = sorted({point.tokens for point in points})
    _draw_slope_guides(axes, sizes[0], sizes[-1], min(value for _, _, value in measured))
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", fontsize=10.5)


def _draw_slope_guides(axes: Axes, first: int, last: int, lowest: float) -> None:
    """Dashed lines that grow like N and N² from below the lowest point, to read the slopes of the others by."""
    growth = last / first
    start = 0.3 * lowest
    for exponent, label in ((1, "∝ N"), (2, "∝ N²")):
        end = start * growth**exponent
        axes.plot((first, last), (start, end), color=MUTED, linewidth=1, linestyle=(0, (4, 4)), zorder=0)
        axes.annotate(label, (last, end), (6, 0), textcoords="offset points", va="center", color=MUTED)


def _cost_caption(points: Sequence[CostPoint], machine: str) -> str:
    lines = [
        f"One image, {HEADS} heads of dim {HEAD_DIM}, float32, median of up to {REPEATS} calls. {machine}.",
        "PyTorch's SDPA on a CPU never stores the N × N weights (a flash algorithm): its memory grows like N too. "
        "“Explicit weights” stores them.",
    ]
    lines += [f"{ATTENTIONS[point.kind].label}, N = {point.tokens:,}: {point.note}." for point in points if point.note]
    return "\n".join(lines)


def _headline(figure: Figure, text: str) -> None:
    figure.text(0.012, 0.985, text, va="top", fontsize=15, fontweight="bold")


def _title(axes: Axes, name: str, statement: str, color: str) -> None:
    axes.set_title(statement, fontsize=10, color=color)
    axes.annotate(name, (0, 1), (0, 24), "axes fraction", "offset points", fontsize=12.5, fontweight="bold")


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white")
