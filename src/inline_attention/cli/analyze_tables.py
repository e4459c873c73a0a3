"""The tables that `inline analyze` prints: summaries of what its files hold in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

from rich import box
from rich.table import Table

from inline_attention.analysis.attention_map import AttentionMaps
from inline_attention.analysis.confusion import ConfusionCount, by_image
from inline_attention.analysis.injectivity import EQUAL_ROWS, EQUAL_ROWS_OF_CALLABLES, CollisionRate, KeyCondition
from inline_attention.analysis.locality import Locality
from inline_attention.analysis.masking import MaskingResult
from inline_attention.analysis.scaling import ScalingPoint
from inline_attention.analysis.subjects import Subject

NOTHING = "–"


def collision_table(subjects: Sequence[Subject], rates: Mapping[str, Sequence[CollisionRate]]) -> Table:
    """A row per model and rule."""
    table = _table(
        "Queries that share their weights with another query",
        ("model", "attention", "φ"),
        ("queries", "constructed", "found", "smallest |Δw|"),
        "Every rule is tried on the model's own queries and keys; * is the model's own. "
        f"|Δw|: difference of rows, relative to what they have beyond uniform attention; up to {EQUAL_ROWS:g} counts "
        f"as equal ({EQUAL_ROWS_OF_CALLABLES:g} where φ is a function of one's own, which computes in float32).",
    )
    for subject in subjects:
        groups: dict[tuple[str, str], list[CollisionRate]] = {}
        for rate in rates[subject.label]:
            groups.setdefault((rate.attention, rate.feature_map), []).append(rate)
        for number, ((attention, feature_map), items) in enumerate(groups.items(), start=1):
            total = sum(item.queries for item in items)
            own = " *" if any(item.is_own for item in items) else ""
            table.add_row(
                subject.label if number == 1 else "",
                f"{attention}{own}",
                feature_map,
                str(total),
                _percent(sum(item.constructed for item in items) / total),
                _percent(sum(item.found for item in items) / total),
                f"{min(item.smallest_difference for item in items):.1e}",
                end_section=number == len(groups),
            )
    return table


def condition_table(subjects: Sequence[Subject], conditions: Mapping[str, Sequence[KeyCondition]]) -> Table:
    """A row per model and layer."""
    table = _table(
        "Is the attention of these layers one-to-one?",
        ("model", "layer", "attention", "φ"),
        ("one-to-one", "rank [K, 1]", "needed", "σ max ÷ min"),
        "Of the keys of the analysed images; one-to-one: of heads × images. Ranks: smallest and largest.",
    )
    table.add_column("because")
    for subject in subjects:
        layers = sorted({item.layer for item in conditions[subject.label]})
        for layer in layers:
            items = [item for item in conditions[subject.label] if item.layer == layer]
            ranks = sorted({item.rank for item in items})
            ratio = median(item.condition for item in items)
            table.add_row(
                subject.label if layer == layers[0] else "",
                str(layer),
                items[0].attention,
                items[0].feature_map,
                _count_injective(items),
                f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
                str(items[0].needed),
                "∞" if ratio == float("inf") else f"{ratio:.3g}",
                min(items, key=lambda item: item.injective is not False).reason,
                end_section=layer == layers[-1],
            )
    return table


def _count_injective(items: Sequence[KeyCondition]) -> str:
    injective = sum(item.injective is True for item in items)
    unknown = sum(item.injective is None for item in items)
    if unknown == len(items):
        return "unknown"
    return f"{injective} of {len(items)}" + (f", {unknown} unknown" if unknown else "")


def confusion_table(
    subjects: Sequence[Subject], counts: Mapping[str, Sequence[ConfusionCount]], tolerance: float
) -> Table:
    """A row per model and layer, and one for all layers of each model."""
    table = _table(
        "Pairs of different queries that get the same attention",
        ("model", "layer"),
        ("heads", "distinct pairs", "confused", "share", "images with any", "most in an image"),
        f"Sums over heads, per image: means, then the image with most. Same: to {tolerance:g} of what rows have beyond "
        "uniform attention.",
    )
    for subject in subjects:
        items = counts[subject.label]
        layers = sorted({item.layer for item in items})
        for layer in [*layers, None]:
            chosen = [item for item in items if layer is None or item.layer == layer]
            per_image = [item.confused_pairs for item in by_image(chosen)]
            distinct = sum(item.distinct_pairs for item in chosen)
            confused = sum(item.confused_pairs for item in chosen)
            table.add_row(
                subject.label if layer == layers[0] else "",
                "all" if layer is None else str(layer),
                str(len(chosen) // max(1, len(per_image))),
                f"{distinct / max(1, len(per_image)):,.0f}",
                f"{confused / max(1, len(per_image)):,.2f}",
                _percent(confused / max(1, distinct)),
                _percent(sum(pairs > 0 for pairs in per_image) / max(1, len(per_image))),
                f"{max(per_image, default=0):,}",
                end_section=layer is None,
            )
    return table


def locality_table(
    subjects: Sequence[Subject], measured: Mapping[str, Sequence[Locality]], sides: Sequence[int]
) -> Table:
    """A row per model, layer and local term."""
    table = _table(
        "Attention inside each query's neighbourhood: share of |w|, times what uniform attention would give",
        ("model", "layer", "attention", "3×3 term"),
        [f"{side}×{side}" for side in sides],
        "Means over queries, heads and images. The signed sums of w are in the files.",
    )
    for subject in subjects:
        items = measured[subject.label]
        groups = list(dict.fromkeys((item.layer, item.local_term) for item in items))
        groups.sort(key=lambda group: (group[0], group[1] == "with"))
        for number, (layer, local_term) in enumerate(groups, start=1):
            chosen = [item for item in items if (item.layer, item.local_term) == (layer, local_term)]
            cells = []
            for side in sides:
                share = mean(item.share for item in chosen if item.side == side)
                uniform = mean(item.uniform for item in chosen if item.side == side)
                cells.append(f"{_percent(share)}  {share / uniform:.2f}×")
            starts = number == 1
            table.add_row(
                subject.label if starts else "",
                str(layer),
                chosen[0].attention,
                local_term,
                *cells,
                end_section=number == len(groups),
            )
    return table


def masking_table(subjects: Sequence[Subject], results: Mapping[str, Sequence[MaskingResult]]) -> Table:
    """A row per model and hiding."""
    table = _table(
        "Top-1 when tokens are hidden from each query",
        ("model", "hidden", "3×3 term"),
        ("top-1 %", "± s.e.", "lost", "images"),
        "random: as many tokens as the neighbourhood has. 3×3 term hidden: it, too, does not see them.",
    )
    for subject in subjects:
        items = results[subject.label]
        for number, item in enumerate(items, start=1):
            hiding = item.hiding
            what = f"{hiding.side}×{hiding.side} {hiding.where}" if hiding.side else hiding.where
            table.add_row(
                subject.label if number == 1 else "",
                what,
                NOTHING if hiding.local_term == "none" else hiding.local_term,
                f"{item.top1:.2f}",
                f"{item.standard_error:.2f}",
                f"{item.drop:.2f}" if hiding.side else NOTHING,
                f"{item.images:,}",
                end_section=number == len(items),
            )
    return table


def map_table(maps: Sequence[AttentionMaps]) -> Table:
    """A row per model and token."""
    table = _table(
        "Weights of the chosen tokens, in multiples of the uniform weight",
        ("model", "attention", "layer", "token"),
        ("largest", "smallest", "its own", "class token"),
        "token: row and column on the layer's grid. Without the local term.",
    )
    for item in maps:
        for number, token_map in enumerate(item.maps, start=1):
            times = token_map.times_uniform
            prefix = token_map.prefix_weights / token_map.uniform
            table.add_row(
                item.label if number == 1 else "",
                item.attention,
                str(item.layer),
                f"{token_map.token[0]},{token_map.token[1]} of {item.grid_size[0]}×{item.grid_size[1]}",
                f"{times.max().item():.2f}",
                f"{times.min().item():.2f}",
                f"{times[token_map.token].item():.2f}",
                f"{prefix[0].item():.2f}" if len(prefix) else NOTHING,
                end_section=number == len(item.maps),
            )
    return table


def scaling_table(points: Sequence[ScalingPoint]) -> Table:
    """A row per size and model."""
    table = _table(
        "Cost of one forward pass",
        ("image", "window", "model"),
        ("ms", "peak MiB", "GMACs"),
        "Peak memory: tensors made in the pass, without weights and images.",
    )
    for number, point in enumerate(points):
        is_last = number + 1 == len(points) or points[number + 1].attention == points[0].attention
        table.add_row(
            f"{point.size}²",
            NOTHING if point.window is None else f"{point.window}²",
            point.model,
            point.note if point.milliseconds is None else f"{point.milliseconds:,.1f}",
            NOTHING if point.peak_bytes is None else f"{point.peak_bytes / 2**20:,.1f}",
            f"{point.macs / 1e9:,.2f}",
            end_section=is_last,
        )
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str], caption: str) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for header in texts:
        table.add_column(header, no_wrap=header == "model")
    for header in numbers:
        table.add_column(header, justify="right")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share == 0 or share >= 0.001 else f"{100 * share:.2g} %"
