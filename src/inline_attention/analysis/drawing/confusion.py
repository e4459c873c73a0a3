"""How many pairs of queries each image confuses, and which tokens of the worst images these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from inline_attention.analysis.confusion import (
    DISTINCT_QUERIES,
    TOLERANCES,
    ConfusedImage,
    ConfusionCount,
    pairs_per_image,
)
from inline_attention.analysis.subjects import Subject
from inline_attention.support.figures import (
    INK,
    MUTED,
    LineStyle,
    as_picture,
    light_grid,
    line_styles,
    new_figure,
    save,
    shared_legend,
    weights_note,
    without_ticks,
)
from inline_attention.support.text import printable

LARGEST_GROUPS = 6  # that get a colour of their own
LONGEST_NAME = 26


def draw_confusion(
    subjects: Sequence[Subject], counts: Mapping[str, Sequence[ConfusionCount]], tolerance: float, folder: Path
) -> list[Path]:
    """Draw the histogram of confused pairs per image, and how the count depends on the tolerance.

    Args:
        subjects: The models.
        counts: By label.
        tolerance: That of the histogram.
        folder: Where `confusion.png` and `.svg` go.
    """
    images = len({count.image for items in counts.values() for count in items})
    small_print = (
        f"{weights_note(subjects)} {images:,} images, pairs over all analysed layers and heads. Confused: rows that "
        f"differ by at most {tolerance:g} of what they have beyond uniform attention, although the queries differ by "
        f"more than {DISTINCT_QUERIES:g} of their length."
    )
    styles = line_styles(subjects)
    with new_figure(12, 5.2, "Different queries that get the same attention", small_print) as figure:
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.25, 1)})
        _draw_histogram(left, counts, styles, tolerance)
        _draw_tolerances(right, counts, styles, tolerance)
        shared_legend(figure, *right.get_legend_handles_labels())
        return save(figure, folder, "confusion")


def draw_worst_images(
    subjects: Sequence[Subject], worst: Mapping[str, Sequence[ConfusedImage]], tolerance: float, folder: Path
) -> list[Path]:
    """Draw a row per model with its most confused images, their confused tokens marked.

    Args:
        subjects: The models.
        worst: By label, the worst first.
        tolerance: That of the count.
        folder: Where `confusion-worst.png` and `.svg` go.

    Returns:
        The files; none where no image confuses anything.
    """
    shown = [subject for subject in subjects if worst[subject.label]]
    spared = [subject.label for subject in subjects if not worst[subject.label]]
    if not shown:
        for suffix in ("png", "svg"):  # those of an earlier analysis would tell another story
            (folder / f"confusion-worst.{suffix}").unlink(missing_ok=True)
        return []
    columns = max(len(worst[subject.label]) for subject in shown)
    small_print = (
        f"{weights_note(subjects)} Each picture shows its worst head: tokens of one colour get the same attention to "
        f"{tolerance:g} of what it has beyond uniform, although their queries differ. Grey: groups beyond the "
        f"{LARGEST_GROUPS} largest. Pairs are counted over all analysed layers and heads."
    ) + (f" No confused pair in any image: {', '.join(spared)}." if spared else "")
    size = (max(8.0, 2.6 * columns), 2.95 * len(shown) + 1.4)
    with new_figure(*size, "Where attention confuses tokens most", small_print) as figure:
        panels = figure.subplots(len(shown), columns, squeeze=False)
        for subject, row in zip(shown, panels, strict=True):
            for axes in row:
                without_ticks(axes)
            for axes, image in zip(row, worst[subject.label], strict=False):
                _draw_confused_image(axes, image)
            row[0].set_ylabel(subject.label, fontweight="bold", fontsize=10)
        return save(figure, folder, "confusion-worst")


def _draw_histogram(
    axes: Axes, counts: Mapping[str, Sequence[ConfusionCount]], styles: Mapping[str, LineStyle], tolerance: float
) -> None:
    totals = {label: list(pairs_per_image(items).values()) for label, items in counts.items()}
    # Bin 0 is no pair at all; bin b holds 2^(b-1) to 2^b - 1 pairs.
    bins = max((total.bit_length() for values in totals.values() for total in values), default=0) + 1
    width = 0.82 / max(len(totals), 1)
    for number, (label, values) in enumerate(totals.items()):
        shares = [sum(total.bit_length() == b for total in values) / max(len(values), 1) for b in range(bins)]
        offset = (number - (len(totals) - 1) / 2) * width
        axes.bar([b + offset for b in range(bins)], shares, width, color=styles[label].color, label=label)
    names = ["0", *(f"{2 ** (b - 1):,}" + (f"–{2**b - 1:,}" if b > 1 else "") for b in range(1, bins))]
    axes.set_xticks(range(bins), names, rotation=40 if bins > 7 else 0, ha="right" if bins > 7 else "center")
    axes.set_xlim(-0.6, max(bins, 4) - 0.4)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="confused pairs in an image", ylabel="images")
    axes.set_title(f"Confused pairs per image, at tolerance {tolerance:g}", fontsize=11, fontweight="bold")
    light_grid(axes)


def _draw_tolerances(
    axes: Axes, counts: Mapping[str, Sequence[ConfusionCount]], styles: Mapping[str, LineStyle], tolerance: float
) -> None:
    lowest = 1.0
    for label, items in counts.items():
        distinct = max(1, sum(item.distinct_pairs for item in items))
        shares = [sum(item.by_tolerance[i] for item in items) / distinct for i in range(len(TOLERANCES))]
        lowest = min([lowest, *(share for share in shares if share > 0)])
        style = styles[label]
        axes.plot(
            TOLERANCES, [share if share > 0 else float("nan") for share in shares],
            color=style.color, marker=style.marker, linestyle=style.dashes, linewidth=2, label=label,
        )  # fmt: skip
    axes.axvline(tolerance, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    axes.set(xscale="log", yscale="log", ylim=(lowest / 3, 1.5), xlabel="tolerance", ylabel="share of distinct pairs")
    axes.set_xlim(TOLERANCES[0] / 2, TOLERANCES[-1] * 2)
    axes.set_title("Confused share, by tolerance (missing: none)", fontsize=11, fontweight="bold")
    light_grid(axes)


def _draw_confused_image(axes: Axes, image: ConfusedImage) -> None:
    picture = as_picture(image.pixels)
    height, width = picture.shape[:2]
    rows, columns = image.grid_size
    axes.imshow(picture, extent=(0, columns, rows, 0), aspect=(height / rows) / (width / columns), alpha=0.75)
    colors = mpl.color_sequences["tab10"]
    for row in range(rows):
        for column in range(columns):
            group = int(image.groups[row, column])
            if group:
                color = colors[group - 1] if group <= LARGEST_GROUPS else MUTED
                cell = Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, facecolor=to_rgba(color, 0.35))
                cell.set(edgecolor=color, linewidth=1.4)
                axes.add_patch(cell)
    name = printable(Path(image.name).name)
    name = name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
    pairs = f"{image.pairs:,} pair{'s' if image.pairs > 1 else ''}"
    axes.set_title(f"{name}\n{pairs}; layer {image.layer}, head {image.head}", fontsize=8.5, color=INK)
