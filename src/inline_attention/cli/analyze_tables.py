"""The tables that `inline analyze` prints: summaries of its result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, TypeVar

from rich.table import Table

from inline_attention.analysis.attention_map import AttentionMaps
from inline_attention.analysis.confusion import ConfusionCount, by_image
from inline_attention.analysis.injectivity import EQUAL_ROWS, EQUAL_ROWS_OF_CALLABLES, CollisionRate, KeyCondition
from inline_attention.analysis.linearize import LinearizeSurvey
from inline_attention.analysis.locality import Locality
from inline_attention.analysis.masking import MaskingResult
from inline_attention.analysis.scaling import ScalingPoint
from inline_attention.cli.printing import make_table
from inline_attention.support.text import NOTHING, number

Item = TypeVar("Item")
Key = TypeVar("Key")


def collision_table(rates: Mapping[str, Sequence[CollisionRate]]) -> Table:
    """Return a row per model and rule."""
    rows = []
    for label, of_model in rates.items():
        for (attention, feature_map), items in _grouped(of_model, lambda item: (item.attention, item.feature_map)):
            total = sum(item.queries for item in items)
            row = [label, attention + (" *" if any(item.is_own for item in items) else ""), feature_map, str(total)]
            row += [_percent(sum(item.constructed for item in items) / total)]
            row += [_percent(sum(item.found for item in items) / total)]
            rows.append([*row, f"{min(item.smallest_difference for item in items):.1e}"])
    return _table(
        "Queries that share their weights with another query",
        ("model", "attention", "φ", "queries", "constructed", "found", "smallest |Δw|"),
        rows,
        "Every rule is tried on the model's own queries and keys; * is the model's own. "
        f"|Δw|: difference of rows, relative to their distance from uniform attention; up to {EQUAL_ROWS:g} counts as "
        f"equal ({EQUAL_ROWS_OF_CALLABLES:g} if φ is your own function, which computes in float32).",
        texts=3,
    )


def condition_table(conditions: Mapping[str, Sequence[KeyCondition]]) -> Table:
    """Return a row per model and layer."""
    rows = []
    for label, of_model in conditions.items():
        for layer, items in sorted(_grouped(of_model, lambda item: item.layer)):
            ranks = sorted({item.rank for item in items})
            ratio = median(item.condition for item in items)
            row = [label, str(layer), items[0].attention, items[0].feature_map, _count_injective(items)]
            row += [f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]), str(items[0].needed)]
            row += ["∞" if ratio == float("inf") else f"{ratio:.3g}"]
            rows.append([*row, min(items, key=lambda item: item.injective is not False).reason])
    return _table(
        "Is the attention of these layers one-to-one?",
        ("model", "layer", "attention", "φ", "one-to-one", "rank [K, 1]", "needed", "σ max ÷ min", "because"),
        rows,
        "Keys of the analyzed images; one-to-one: of heads × images. Ranks: smallest and largest.",
        texts=4,
    )


def confusion_table(counts: Mapping[str, Sequence[ConfusionCount]], tolerance: float) -> Table:
    """Return a row per model and layer, and one for all layers of each model."""
    rows = []
    for label, of_model in counts.items():
        layers = sorted(_grouped(of_model, lambda item: item.layer))
        for layer, items in [*layers, ("all", of_model)]:
            per_image = [item.confused_pairs for item in by_image(items)]
            images = max(1, len(per_image))
            distinct = sum(item.distinct_pairs for item in items)
            confused = sum(item.confused_pairs for item in items)
            row = [label, str(layer), str(len(items) // images), f"{distinct / images:,.0f}"]
            row += [f"{confused / images:,.2f}", _percent(confused / max(1, distinct))]
            row += [_percent(sum(pairs > 0 for pairs in per_image) / images), f"{max(per_image, default=0):,}"]
            rows.append(row)
    return _table(
        "Pairs of different queries that get the same attention",
        ("model", "layer", "heads", "distinct pairs", "confused", "share", "images with any", "most in an image"),
        rows,
        "Sums over heads, per image: means, then the image with most. "
        f"Same: up to {tolerance:g} of the rows' distance from uniform attention.",
        texts=2,
    )


def locality_table(measured: Mapping[str, Sequence[Locality]], sides: Sequence[int]) -> Table:
    """Return a row per model, layer and local term."""
    rows = []
    for label, of_model in measured.items():
        groups = _grouped(of_model, lambda item: (item.layer, item.local_term))
        for (layer, local_term), items in sorted(groups, key=lambda group: (group[0][0], group[0][1] == "with")):
            row = [label, str(layer), items[0].attention, local_term]
            for side in sides:
                share = mean(item.share for item in items if item.side == side)
                uniform = mean(item.uniform for item in items if item.side == side)
                row.append(f"{_percent(share)}  {share / uniform:.2f}×")
            rows.append(row)
    return _table(
        "Attention inside each query's neighborhood: share of |w|, and its multiple of uniform attention",
        ("model", "layer", "attention", "3×3 term", *(f"{side}×{side}" for side in sides)),
        rows,
        "Means over queries, heads and images. The signed sums of w are in the files.",
        texts=4,
    )


def masking_table(results: Mapping[str, Sequence[MaskingResult]], sides: Sequence[int]) -> Table:
    """Return a row per model and hiding; the caption names the sides that were left out."""
    rows, left_out = [], ""
    for label, items in results.items():
        for item in items:
            hiding = item.hiding
            row = [label, f"{hiding.side}×{hiding.side} {hiding.where}" if hiding.side else hiding.where]
            row += [NOTHING if hiding.local_term == "none" else hiding.local_term]
            row += [f"{item.top1:.2f}", f"{item.standard_error:.2f}"]
            rows.append([*row, f"{item.drop:.2f}" if hiding.side else NOTHING, f"{item.images:,}"])
        if missing := [f"{side}×{side}" for side in sides if side not in {item.hiding.side for item in items}]:
            left_out += f" {label}: {', '.join(missing)} left out, as large as its smallest token grid or larger."
    return _table(
        "Top-1 when tokens are hidden from each query",
        ("model", "hidden", "3×3 term", "top-1 %", "± s.e.", "lost", "images"),
        rows,
        f"random: as many tokens as the neighborhood has. 3×3 term hidden: it does not see them either.{left_out}",
        texts=3,
    )


def linearize_table(surveys: Mapping[str, LinearizeSurvey]) -> Table:
    """Return a row per model and block."""
    rows = []
    for label, survey in surveys.items():
        for item in survey.blocks:
            shares = (item.inline_r2, item.linear_r2, item.lost_alone, item.lost_together)
            inline, linear, alone, together = (f"{share:.1f}" for share in shares)
            top1 = [NOTHING if value is None else f"{value:.1f}" for value in (item.top1_alone, item.top1_together)]
            rows.append([label, str(item.block), inline, linear, alone, top1[0], str(item.order), together, top1[1]])
    accuracy = ", ".join(f"{label} {survey.top1:.1f}" for label, survey in surveys.items() if survey.top1 is not None)
    return _table(
        "What each block loses without softmax, untrained",
        ("model", "block", "InLine R² %", "linear R² %", "lost alone %", "top-1", "order", "lost together %", "top-1"),
        rows,
        "R²: share of softmax's output beyond the mean value. Lost: share of the final tokens' variance. Together: "
        f"with all blocks of lower order.{f' Top-1 with softmax: {accuracy}.' if accuracy else ''}",
        texts=1,
    )


def map_table(maps: Sequence[AttentionMaps]) -> Table:
    """Return a row per model and token."""
    rows = []
    for item in maps:
        for token_map in item.maps:
            times = token_map.times_uniform
            prefix = token_map.prefix_weights / token_map.uniform
            place = f"{token_map.token[0]},{token_map.token[1]} of {item.grid_size[0]}×{item.grid_size[1]}"
            weights = [*(f"{value.item():.2f}" for value in (times.max(), times.min(), times[token_map.token]))]
            class_token = f"{prefix[0].item():.2f}" if len(prefix) else NOTHING
            rows.append([item.label, item.attention, str(item.layer), place, *weights, class_token])
    return _table(
        "Weights of the chosen tokens, in multiples of the uniform weight",
        ("model", "attention", "layer", "token", "largest", "smallest", "its own", "class token"),
        rows,
        "token: row and column on the layer's grid. Without the local term.",
        texts=4,
    )


def scaling_table(points: Sequence[ScalingPoint]) -> Table:
    """Return a row per size and model."""
    rows = [
        [
            f"{point.size}²",
            NOTHING if point.window is None else f"{point.window}²",
            point.model,
            point.note if point.milliseconds is None else f"{point.milliseconds:,.1f}",
            number(point.peak_bytes, 1, 2**20),
            number(point.macs, 2, 1e9),
        ]
        for point in points
    ]
    caption = "Peak memory: tensors made in the pass, without weights and images."
    header = ("image", "window", "model", "ms", "peak MiB", "GMACs")
    return make_table(
        header, rows, texts=3, group_by=lambda row: row[:2], title="Cost of one forward pass", caption=caption
    )


def _count_injective(items: Sequence[KeyCondition]) -> str:
    injective = sum(item.injective is True for item in items)
    unknown = sum(item.injective is None for item in items)
    if unknown == len(items):
        return "unknown"
    return f"{injective} of {len(items)}" + (f", {unknown} unknown" if unknown else "")


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> list[tuple[Key, list[Item]]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str, *, texts: int) -> Table:
    return make_table(header, rows, texts=texts, group_by=lambda row: row[0], title=title, caption=caption)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share == 0 or share >= 0.001 else f"{100 * share:.2g} %"
