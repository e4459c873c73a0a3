"""How much of its attention a query spends on its neighborhood, compared with uniform attention.

Neighborhoods end at the border and, in windows, at the window's edge, and so does the uniform value: visible neighbors
over visible keys. Class tokens are keys like others, but have no neighborhood.

Shapes: `Q` queries, `N` tokens, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias, Unpack

from torch import Tensor

from inline_attention.analysis.probes import TAPS, LayerAttention, neighborhood_mask
from inline_attention.analysis.subjects import Chosen, PictureSample, Subject, captured_images
from inline_attention.ops.reference import AttentionKind
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style, draw_line, whole_numbers

SIDES = (3, 5, 7)
AVERAGED = ("share", "signed", "uniform")
LocalTerm: TypeAlias = Literal["without", "with"]


@dataclass(frozen=True)
class Locality:
    """Attention inside the neighborhoods of one head, averaged over queries and images."""

    layer: int
    head: int | None  # None for the mean over heads
    attention: AttentionKind
    local_term: LocalTerm  # only layers that have a 3×3 term give both
    side: int  # of the neighborhood in tokens
    share: float  # sum of |w| inside over the sum of |w| over all keys
    signed: float  # sum of w inside, which differs because InLine's weights may be negative
    uniform: float  # value of both for uniform attention


def survey_locality(
    subject: Subject, sample: PictureSample, *, sides: Sequence[int] = SIDES, **chosen: Unpack[Chosen]
) -> list[Locality]:
    """Return the locality of every layer and head, averaged over images."""
    measured: list[Locality] = []
    for _, _, places in captured_images(subject, sample, **chosen):
        for place in places:
            measured += measure_locality(*place, sides=sides)
    return average(measured)


def measure_locality(
    layer: LayerAttention, image: int, head: int, *, sides: Sequence[int] = SIDES
) -> Iterator[Locality]:
    """Measure one head of one image: for each side without the local term, then with it where there is one."""
    if any(side < 3 for side in sides):
        raise ValueError(f"neighborhoods must be at least 3 tokens wide, as the local term is, got {list(sides)}")
    rows = layer.rows(image, head)
    absolute = rows.abs()
    grid = slice(layer.num_prefix_tokens, None)
    reach = layer.reach(head)
    with_local = None if layer.local_weight is None else _changes_by_local_term(layer, image, head, rows)
    for side in sides:
        near = reach & neighborhood_mask(layer.grid_size, layer.num_prefix_tokens, side, rows.device)
        uniform = (near.sum(1) / reach.sum(1).double())[grid].mean().item()
        inside, inside_absolute = (rows * near).sum(1), (absolute * near).sum(1)
        parts: list[tuple[LocalTerm, Tensor, Tensor]] = [("without", inside_absolute / absolute.sum(1), inside)]
        if with_local is not None:
            # A 3×3 kernel is inside every neighborhood, so both sums change by the same amount. They are computed per
            # channel and averaged: |w + r| is not |w| + |r|.
            added, added_absolute = with_local  # [N, D]
            share = (inside_absolute[:, None] + added_absolute) / (absolute.sum(1, keepdim=True) + added_absolute)
            parts.append(("with", share.mean(1), (inside[:, None] + added).mean(1)))
        for term, share, signed in parts:
            means = share[grid].mean().item(), signed[grid].mean().item()
            yield Locality(layer.index, head, layer.rule.kind, term, side, *means, uniform)


def average(measured: Sequence[Locality], *, over_heads: bool = False) -> list[Locality]:
    """Return the means over several images, and over heads if asked."""
    groups: dict[tuple[object, ...], list[Locality]] = {}
    for item in measured:
        item = replace(item, head=None) if over_heads else item
        groups.setdefault((item.layer, item.head, item.attention, item.local_term, item.side), []).append(item)
    return [
        replace(items[0], **{name: fmean(getattr(item, name) for item in items) for name in AVERAGED})
        for items in groups.values()
    ]


def locality_chart(styles: Mapping[str, Style], measured: Mapping[str, Sequence[Locality]]) -> Chart:
    """Return a panel per neighborhood: its share of |w| by layer, mean over heads."""
    means = {label: average(items, over_heads=True) for label, items in measured.items()}

    def draw(axes: Axes, side: int) -> None:
        uniform = (
            tuple(sorted({(item.layer, 100 * item.uniform) for item in items if item.side == side}))
            for items in means.values()
        )
        for points in dict.fromkeys(uniform):  # one line for models with equal grids
            draw_line(axes, Style("uniform"), points)
        for label, items in means.items():
            for term in ("without", "with"):
                chosen = [item for item in items if (item.side, item.local_term) == (side, term)]
                points = sorted((item.layer, 100 * item.share) for item in chosen)
                draw_line(axes, styles[label], points, hollow=term == "with")
        axes.set(ylabel="% of |w|", ylim=(0, 1.07 * axes.dataLim.ymax))
        whole_numbers(axes, "layer")

    legend = [
        LegendEntry(f"{label} with its 3×3 term" if term == "with" else label, styles[label], hollow=term == "with")
        for label, items in means.items()
        for term in dict.fromkeys(item.local_term for item in items)
    ]
    panels = []
    for side in sorted({item.side for items in measured.values() for item in items}):
        description = f"Share of attention in the {side}×{side} neighborhood by layer."
        panels.append(Panel(f"{side}×{side} tokens", partial(draw, side=side), description))
    return Chart(panels, [*legend, LegendEntry("uniform attention", Style("uniform"))])


def draw_locality(
    styles: Mapping[str, Style], measured: Mapping[str, Sequence[Locality]], note: str, folder: Path
) -> list[Path]:
    """Write `locality.png` and `.svg`; the small print starts with the note."""
    small_print = (
        f"{note} Share: sum of |w| over the neighborhood ÷ sum of |w| over all keys, mean over queries, heads and "
        "images. Hollow: with the 3×3 local term, mean over channels."
    )
    title = "Attention that stays near its query"
    return locality_chart(styles, measured).save(folder, "locality", title=title, small_print=small_print)


def _changes_by_local_term(layer: LayerAttention, image: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much the 3×3 term changes the sums of w and of |w| of every row, per channel: `[N, D]` each."""
    assert layer.local_weight is not None
    numbers, exists = layer.neighbors(head)
    weights = rows.gather(1, numbers)  # [N, 9]
    kernel = layer.local_weight[image, head].double().flatten(-2)  # [D, 9]
    added, added_absolute = rows.new_zeros(2, layer.num_tokens, layer.head_dim)
    for tap in range(TAPS):
        weight, present = weights[:, tap, None], exists[:, tap, None]
        added += kernel[None, :, tap] * present
        added_absolute += ((weight + kernel[None, :, tap]).abs() - weight.abs()) * present
    return added, added_absolute
