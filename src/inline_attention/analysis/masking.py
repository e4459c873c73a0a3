"""Accuracy when every query is kept from seeing its neighborhood, compared with as many random tokens.

A hidden token counts nowhere for that query: weights are normalized over the rest. Prefix tokens hide nothing and are
not hidden.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from inline_attention.analysis.locality import SIDES
from inline_attention.analysis.probes import (
    LayerAttention,
    attention_layers,
    capture_attention,
    neighborhood_mask,
    observed,
)
from inline_attention.analysis.subjects import OnProgress, PictureSample, Subject, check_has_head
from inline_attention.data.batch import Batch
from inline_attention.data.randomness import derived_seed
from inline_attention.support.figures import INK, LIGHT, PAPER, Axes, Chart, LegendEntry, Panel, Style, light_grid

Where: TypeAlias = Literal["nothing", "neighborhood", "random"]
LocalTerm: TypeAlias = Literal["none", "kept", "hidden"]
BYTES_AT_ONCE = 1 << 28  # of weights
WHERE_LABELS = {"neighborhood": "neighborhood hidden", "random": "as many random tokens hidden"}
WHERE_KINDS = {"neighborhood": "hidden", "random": "random"}  # kinds of `figures.Style`
TERM_LABELS = {"none": "no 3×3 term", "hidden": "hidden from the 3×3 term too", "kept": "3×3 term sees all"}
LEAST_FOR_LABEL = 12.0  # percent of top-1 that leave room for a label inside the bar


@dataclass(frozen=True)
class Hiding:
    """What is hidden from each query."""

    where: Where  # "neighborhood": the query and what is around it; "random": as many tokens
    side: int  # of the neighborhood in tokens; 0 for "nothing"
    local_term: LocalTerm  # "kept": the 3×3 term still reads hidden tokens; "none": the model has no such term


@dataclass(frozen=True)
class MaskingResult:
    """Accuracy under one hiding."""

    hiding: Hiding
    top1: float  # percent
    baseline_top1: float  # percent, with nothing hidden
    images: int

    @property
    def drop(self) -> float:
        """Points of top-1 lost."""
        return self.baseline_top1 - self.top1

    @property
    def standard_error(self) -> float:
        """Standard error of top-1 in points, from the number of images."""
        share = self.top1 / 100
        return 100 * (share * (1 - share) / self.images) ** 0.5


def survey_masking(
    subject: Subject,
    sample: PictureSample,
    *,
    sides: Sequence[int] = SIDES,
    seed: int = 0,
    on_progress: OnProgress = lambda _: None,
) -> list[MaskingResult]:
    """Measure accuracy under every hiding, on labeled pictures, which are read once per hiding.

    Sides that cover the smallest token grid are left out: neighborhood and random tokens would be the same there.
    """
    check_has_head(subject)
    blank = subject.normalize(torch.zeros(1, 3, *subject.image_size, dtype=torch.uint8))
    smallest = min(min(layer.grid_size) for layer in capture_attention(subject.model, blank))
    if not (sides := [side for side in sides if side < smallest]):
        raise ValueError(f"{subject.label} has a grid of only {smallest} tokens a side, which each neighborhood covers")
    passes = len(planned_hidings(subject.model, sides))
    batches = partial(sample.batches, subject, normalized=True, passes=passes, on_progress=on_progress)
    return measure_masking(subject.model, batches, sides=sides, seed=seed)


def planned_hidings(model: nn.Module, sides: Sequence[int]) -> list[Hiding]:
    """Return nothing hidden, then for each side neighborhood and random tokens, with the 3×3 term hidden and kept."""
    layers = attention_layers(model).values()
    has_local_term = any(getattr(layer, name, None) for layer in layers for name in ("residual", "static_local"))
    local_terms: tuple[LocalTerm, ...] = ("hidden", "kept") if has_local_term else ("none",)
    wheres: tuple[Where, ...] = ("neighborhood", "random")
    hidings = [Hiding(where, side, term) for term in local_terms for side in sides for where in wheres]
    return [Hiding("nothing", 0, local_terms[-1]), *hidings]


def measure_masking(
    model: nn.Module, batches: Callable[[], Iterable[Batch]], *, sides: Sequence[int] = SIDES, seed: int = 0
) -> list[MaskingResult]:
    """Evaluate a classifier under every hiding, each time on the normalized, labeled images that `batches` returns."""
    results: list[MaskingResult] = []
    for hiding in planned_hidings(model, sides):
        correct = images = 0
        with torch.no_grad(), hidden_tokens(model, hiding, seed=seed):
            for batch in batches():
                correct += int((model(batch.images).argmax(1) == batch.targets).sum())
                images += len(batch)
        if images == 0:
            raise ValueError("there is no image to evaluate on; check --data-dir and --split")
        top1 = 100 * correct / images
        results.append(MaskingResult(hiding, top1, results[0].top1 if results else top1, images))
    return results


def hidden_tokens(model: nn.Module, hiding: Hiding, *, seed: int = 0) -> AbstractContextManager[None]:
    """Hide keys from the queries of all attention layers inside a `with` block.

    Random tokens are drawn anew for every layer and batch, from the seed.
    """
    generator = torch.Generator().manual_seed(derived_seed("masking", seed, hiding.side))

    def mix(layer: LayerAttention) -> Tensor:
        hide = hidden_keys(layer, hiding, generator)
        return mixed_values(layer, hide, hide_from_local_term=hiding.local_term == "hidden")

    return nullcontext() if hiding.where == "nothing" else observed(model, mix)


def hidden_keys(layer: LayerAttention, hiding: Hiding, generator: torch.Generator) -> Tensor:
    """Return `[H, N, N]` bool, True where a key is hidden from a query.

    At random, each query loses as many keys as its neighborhood has, drawn from the grid tokens that it can see: fewer
    at the border, and none for prefix tokens, which have no neighborhood.
    """
    device = layer.q.device
    near = neighborhood_mask(layer.grid_size, layer.num_prefix_tokens, hiding.side, device)
    masks: list[Tensor] = []
    for head in range(1 if layer.groups is None else layer.num_heads):  # without groups, all heads lose the same
        reach = layer.reach(head)
        hide = near & reach
        if hiding.where == "random":
            reach[:, : layer.num_prefix_tokens] = False  # prefix tokens are never hidden
            draw = torch.rand(hide.shape, generator=generator).to(device).masked_fill(~reach, 2.0)
            hide = draw.argsort(1).argsort(1) < hide.sum(1, keepdim=True)
        masks.append(hide)
    return torch.stack(masks).expand(layer.num_heads, -1, -1)


def mixed_values(layer: LayerAttention, hidden: Tensor | None = None, *, hide_from_local_term: bool = True) -> Tensor:
    """Return the input of the layer's output projection, `[B, N, C]`, computed with explicit weights.

    `hidden` `[H, N, N]` is True where a key is hidden from a query.
    """
    dtype = torch.promote_types(layer.v.dtype, torch.float32)
    at_once = max(1, BYTES_AT_ONCE // (layer.num_tokens**2 * dtype.itemsize))
    out = torch.empty_like(layer.v)
    for head in range(layer.num_heads):
        hide = None if hidden is None else hidden[head]
        for start in range(0, len(layer.q), at_once):
            images = slice(start, start + at_once)
            weights = layer.rows(images, head, hidden=hide, dtype=dtype)
            mixed = (weights @ layer.v[images, :, head].to(dtype)).to(out.dtype)
            local = layer.local_term(images, head, hide if hide_from_local_term else None)
            out[images, :, head] = mixed if local is None else mixed + local
    return out.flatten(2)


def masking_chart(results: Mapping[str, Sequence[MaskingResult]]) -> Chart:
    """Return a panel per model, and per treatment of its local term: top-1 by the side of what is hidden."""
    panels: list[Panel] = []
    for label, items in results.items():
        for term in dict.fromkeys(item.hiding.local_term for item in items if item.hiding.side):
            shown = [item for item in items if item.hiding.local_term == term and item.hiding.side]
            title = label if term == "none" else f"{label}, {TERM_LABELS[term]}"
            found = ", ".join(
                f"{item.top1:.1f} % with {WHERE_LABELS[item.hiding.where]} ({item.hiding.side}×{item.hiding.side})"
                for item in shown
            )
            description = f"{title}: {shown[0].baseline_top1:.1f} % with nothing hidden, {found}."
            panels.append(Panel(title, partial(_draw_masking, items=shown), description))
    legend = [LegendEntry(text, Style(WHERE_KINDS[where]), is_patch=True) for where, text in WHERE_LABELS.items()]
    return Chart(panels, legend)


def draw_masking(results: Mapping[str, Sequence[MaskingResult]], note: str, folder: Path) -> list[Path]:
    """Write `masking.png` and `.svg`; the small print starts with the note."""
    images = max(item.images for items in results.values() for item in items)
    small_print = (
        f"{note} {images:,} images. Hidden tokens count nowhere for their query: weights are normalized over the rest, "
        "in all layers and heads. Dashed: nothing hidden. Error bars: ± one standard error over the images."
    )
    title = "What hiding each query's neighborhood costs"
    return masking_chart(results).save(folder, "masking", title=title, small_print=small_print)


def _draw_masking(axes: Axes, items: Sequence[MaskingResult]) -> None:
    sides = sorted({item.hiding.side for item in items})
    for item in items:
        position = sides.index(item.hiding.side) + (-0.17 if item.hiding.where == "neighborhood" else 0.17)
        color = LIGHT[WHERE_KINDS[item.hiding.where]]
        axes.bar(position, item.top1, 0.32, color=color)
        axes.errorbar(position, item.top1, item.standard_error, color=INK, capsize=3, linewidth=1.2)
        if item.top1 > LEAST_FOR_LABEL:  # above a high bar, the label would touch the dashed line
            axes.text(position, 2, f"{item.top1:.1f}", color=PAPER, fontweight="bold", ha="center", va="bottom")
        else:
            top = item.top1 + item.standard_error + 1
            axes.text(position, top, f"{item.top1:.1f}", fontweight="bold", ha="center", va="bottom")
    axes.axhline(items[0].baseline_top1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(sides)), [f"{side}×{side}" for side in sides])
    axes.set(xlabel="tokens hidden around each token", ylabel="top-1 (%)", xlim=(-0.8, len(sides) - 0.2), ylim=(0, 105))
    axes.set_yticks(range(0, 101, 25))
    light_grid(axes)
