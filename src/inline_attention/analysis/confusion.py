"""How often, on real images, different queries get the same attention: the paper's count of confusions.

With uniform attention u and a tolerance t, two queries of one head are *confused* if ‖w - w'‖ ≤ t · max(‖w - u‖,
‖w' - u‖) although ‖q - q'‖ > 0.1 · max(‖q‖, ‖q'‖).

Shapes: `N` tokens, which are all queries.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Unpack

import torch
from torch import Tensor

from inline_attention.analysis.injectivity import DISTINCT_QUERIES
from inline_attention.analysis.probes import LayerAttention, beyond_uniform, check_matrix_size
from inline_attention.analysis.subjects import Chosen, PictureSample, Subject, captured_images
from inline_attention.ops.reference import AttentionKind
from inline_attention.support import figures
from inline_attention.support.figures import Axes, Chart, DotRow, LegendEntry, Panel, Style, dot_panel
from inline_attention.support.text import printable

TOLERANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TOLERANCE = 1e-2
LONGEST_NAME = 26
LARGEST_GROUPS = 6  # groups of confused tokens that get a color of their own


@dataclass(frozen=True)
class ConfusionCount:
    """The confused pairs of one head of one image."""

    image: str
    layer: int
    head: int
    attention: AttentionKind
    tokens: int
    distinct_pairs: int  # pairs of queries that differ
    confused_pairs: int  # those with equal rows, at the chosen tolerance
    confused_tokens: int  # in at least one such pair
    by_tolerance: tuple[int, ...]  # confused pairs at each of TOLERANCES


@dataclass(frozen=True)
class ImageConfusion:
    """The confused pairs of one image over all layers and heads."""

    image: str
    distinct_pairs: int
    confused_pairs: int

    @property
    def percent(self) -> float:
        """Confused pairs in percent of the distinct ones."""
        return 100 * self.confused_pairs / max(self.distinct_pairs, 1)


@dataclass(frozen=True)
class ConfusedImage:
    """An image to show, with the tokens that its worst head confuses."""

    name: str
    pixels: Tensor  # [3, H, W] uint8
    pairs: int  # over all layers and heads
    layer: int
    head: int  # with most confused pairs
    groups: Tensor  # [h, w]: equal numbers are confused, 0 with none; the largest group has number 1


def survey_confusion(
    subject: Subject, sample: PictureSample, *, tolerance: float = TOLERANCE, worst: int = 4, **chosen: Unpack[Chosen]
) -> tuple[list[ConfusionCount], list[ConfusedImage]]:
    """Return the confused pairs of every image, layer and head, and the `worst` images with most of them."""
    counts: list[ConfusionCount] = []
    shown: list[ConfusedImage] = []
    for name, pixels, places in captured_images(subject, sample, **chosen):
        found = [count_confusion(*place, name, tolerance=tolerance)[0] for place in places]
        counts += found
        most = max(range(len(found)), key=lambda number: found[number].confused_pairs)
        if worst and found[most].confused_pairs:
            layer, image, head = places[most]
            _, confused = count_confusion(layer, image, head, tolerance=tolerance)  # those of all heads would not fit
            groups = connected_groups(confused)[layer.num_prefix_tokens :].view(layer.grid_size)
            pairs = sum(count.confused_pairs for count in found)
            # A view of the pixels would keep the whole batch.
            shown = worst_images([*shown, ConfusedImage(name, pixels.clone(), pairs, layer.index, head, groups)], worst)
    return counts, shown


def worst_images(images: Iterable[ConfusedImage], limit: int) -> list[ConfusedImage]:
    """Return the images with most confused pairs, the worst first, without those that have none."""
    return [image for image in heapq.nlargest(limit, images, key=lambda image: image.pairs) if image.pairs > 0]


def count_confusion(
    layer: LayerAttention, image: int, head: int, name: str = "", *, tolerance: float = TOLERANCE
) -> tuple[ConfusionCount, Tensor]:
    """Return the confused pairs of one head of one image: their count, and `[N, N]` bool, True for confused pairs."""
    check_matrix_size(layer.num_tokens, layer.num_tokens)
    distinct = pairwise_difference(layer.q[image, :, head].double()) > DISTINCT_QUERIES
    reach = layer.reach(head)
    rows = beyond_uniform(layer.rows(image, head), reach.double() / reach.sum(1, keepdim=True))
    difference = pairwise_difference(rows).masked_fill_(~distinct, torch.inf)
    confused = difference <= tolerance
    count = ConfusionCount(
        image=name,
        layer=layer.index,
        head=head,
        attention=layer.rule.kind,
        tokens=layer.num_tokens,
        distinct_pairs=int(distinct.sum()) // 2,
        confused_pairs=int(confused.sum()) // 2,
        confused_tokens=int(confused.any(1).sum()),
        by_tolerance=tuple(int((difference <= bound).sum()) // 2 for bound in TOLERANCES),
    )
    return count, confused


def pairwise_difference(rows: Tensor) -> Tensor:
    """Return ‖a - b‖ over the longer of a and b for all pairs of rows `[N, M]`, as `[N, N]`; 0 where both are zero."""
    lengths = rows.norm(dim=1)
    longer = torch.maximum(lengths[:, None], lengths[None, :]).clamp(min=torch.finfo(rows.dtype).tiny)
    # Of many rows through inner products, which is fast and in float64 exact to about 1e-8 of the lengths.
    return (torch.cdist(rows, rows) / longer).fill_diagonal_(0)


def connected_groups(confused: Tensor) -> Tensor:
    """Return the numbers `[N]` of groups that pairs `[N, N]` connect, the largest first; 0 for single tokens."""
    count = len(confused)
    linked = confused.cpu() | torch.eye(count, dtype=torch.bool)
    label = torch.arange(count)
    while not torch.equal(label, spread := torch.where(linked, label, count).amin(1)):
        label = spread  # each token takes the smallest label that it is linked to
    _, inverse, sizes = label.unique(return_inverse=True, return_counts=True)
    number = sizes.argsort(descending=True, stable=True).argsort() + 1
    return torch.where(sizes > 1, number, 0)[inverse]


def by_image(counts: Iterable[ConfusionCount]) -> list[ImageConfusion]:
    """Return the confused pairs of each image over all layers and heads."""
    distinct, confused = Counter[str](), Counter[str]()
    for count in counts:
        distinct[count.image] += count.distinct_pairs
        confused[count.image] += count.confused_pairs
    return [ImageConfusion(image, pairs, confused[image]) for image, pairs in distinct.items()]


def confusion_panel(styles: Mapping[str, Style], images: Mapping[str, Sequence[ImageConfusion]]) -> Panel:
    """Return a row of dots per model: each picture's share of confused pairs."""
    rows: list[DotRow] = []
    for label, items in images.items():
        shares = [item.percent for item in items]
        rows.append(DotRow(label, styles[label], shares, fmean(shares), f"mean {fmean(shares):.2g} %"))
    means = ", ".join(f"{row.text} with {row.label}" for row in rows)
    description = f"Share of confused pairs of queries in each picture: {means}."
    return dot_panel(rows, "confused pairs of queries (% of those that differ)", description, from_zero=True)


def draw_confusion(
    styles: Mapping[str, Style],
    counts: Mapping[str, Sequence[ConfusionCount]],
    tolerance: float,
    note: str,
    folder: Path,
) -> list[Path]:
    """Write `confusion.png` and `.svg`: confused pairs of each image, and their share by tolerance."""

    def draw(axes: Axes) -> None:
        for label, items in counts.items():
            distinct = max(1, sum(item.distinct_pairs for item in items))
            confused = [sum(pairs) for pairs in zip(*(item.by_tolerance for item in items), strict=True)]
            points = [(bound, pairs / distinct) for bound, pairs in zip(TOLERANCES, confused, strict=True) if pairs]
            figures.draw_line(axes, styles[label], points)
        axes.axvline(tolerance, color=figures.MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        axes.set(xscale="log", yscale="log", xlabel="tolerance", ylabel="share of distinct pairs")
        axes.set(xlim=(TOLERANCES[0] / 2, TOLERANCES[-1] * 2))
        if not axes.dataLim.y1 > 0:  # no pair is confused: a log scale has nothing to fit to
            axes.set(ylim=(1e-6, 1))
        figures.light_grid(axes)

    images = {label: by_image(items) for label, items in counts.items()}
    small_print = (
        f"{note} {max(map(len, images.values())):,} images, pairs over all analyzed layers and heads. Confused: rows "
        f"that differ by at most {tolerance:g} of their difference from uniform attention, although the queries differ "
        f"by more than {DISTINCT_QUERIES:g} of their length."
    )
    panels = [confusion_panel(styles, images), Panel("Confused share by tolerance (zeros not drawn)", draw)]
    legend = [LegendEntry(label, styles[label]) for label in counts]
    title = "Different queries that get the same attention"
    return Chart(panels, legend).save(folder, "confusion", title=title, small_print=small_print, width=6.0)


def draw_worst_images(
    worst: Mapping[str, Sequence[ConfusedImage]], tolerance: float, note: str, folder: Path
) -> list[Path]:
    """Write `confusion-worst.png` and `.svg`: a row per model with its most confused images, confused tokens marked.

    Nothing is written if no image has a confused pair.
    """
    shown = {label: images for label, images in worst.items() if images}
    if not shown:
        for suffix in ("png", "svg"):  # those of an earlier analysis would be misleading
            (folder / f"confusion-worst.{suffix}").unlink(missing_ok=True)
        return []
    columns = max(map(len, shown.values()))
    small_print = (
        f"{note} Each picture shows its worst head: tokens of one color get the same attention up to {tolerance:g} of "
        "its difference from uniform attention, although their queries differ. Gray: groups beyond the "
        f"{LARGEST_GROUPS} largest. Pairs are counted over all analyzed layers and heads."
    ) + "".join(f" {label}: no confused pair in any image." for label in worst if label not in shown)
    size = (max(8.0, 2.6 * columns), 2.95 * len(shown) + 1.4)
    with figures.new_figure(*size, "Where attention confuses tokens most", small_print) as figure:
        panels = figure.subplots(len(shown), columns, squeeze=False)
        for (label, images), row in zip(shown.items(), panels, strict=True):
            for axes, image in zip(row, images, strict=False):
                _draw_confused_image(axes, image)
            for axes in row[len(images) :]:
                axes.set_axis_off()
            row[0].set_ylabel(label, fontweight="bold", fontsize=10)
        return figures.save(figure, folder, "confusion-worst")


def _draw_confused_image(axes: Axes, image: ConfusedImage) -> None:
    from matplotlib import color_sequences
    from matplotlib.patches import Rectangle

    rows, columns = image.groups.shape
    figures.draw_picture(axes, image.pixels.permute(1, 2, 0).cpu().numpy(), (rows, columns), alpha=0.75)
    for row, column in image.groups.nonzero().tolist():
        group = int(image.groups[row, column])
        color = color_sequences["tab10"][group - 1] if group <= LARGEST_GROUPS else figures.MUTED
        place = (column + 0.06, row + 0.06)
        axes.add_patch(Rectangle(place, 0.88, 0.88, facecolor=(color, 0.35), edgecolor=color, linewidth=1.4))
    name = printable(Path(image.name).name)
    name = name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
    pairs = f"{image.pairs:,} pair{'s' if image.pairs > 1 else ''}"
    axes.set_title(f"{name}\n{pairs}; layer {image.layer}, head {image.head}", fontsize=8.5)
