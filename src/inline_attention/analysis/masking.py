"""What a model loses when every query is kept from seeing its neighbourhood, against as many tokens taken at random.

If attention works through its neighbourhood, hiding that costs more than hiding random tokens. A hidden token counts
nowhere for that query: softmax and linear attention divide by what is left, InLine subtracts the mean of what is left
and divides by how many are left, so that rows sum to one as before. Prefix tokens hide nothing and are not hidden.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from inline_attention.analysis.explicit import LARGEST_MATRIX
from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.analysis.neighbourhoods import neighbourhood_mask
from inline_attention.analysis.probes import attention_layers, observed
from inline_attention.data.batch import Batch
from inline_attention.data.randomness import derived_seed

Where: TypeAlias = Literal["nothing", "neighbourhood", "random"]
LocalTerm: TypeAlias = Literal["none", "kept", "hidden"]
BYTES_AT_ONCE = LARGEST_MATRIX // 2


@dataclass(frozen=True)
class Hiding:
    """What is hidden from each query.

    Attributes:
        where: "neighbourhood" (the query and what is around it), as many tokens at "random", or "nothing".
        side: Of the neighbourhood in tokens; 0 for "nothing".
        local_term: Whether the 3×3 term still reads hidden tokens ("kept"), or does not ("hidden"); "none" for a model
            that has no such term.
    """

    where: Where
    side: int
    local_term: LocalTerm


@dataclass(frozen=True)
class MaskingResult:
    """Accuracy under one hiding.

    Attributes:
        hiding: What was hidden.
        top1: Percent.
        baseline_top1: Percent with nothing hidden.
        images: How many.
    """

    hiding: Hiding
    top1: float
    baseline_top1: float
    images: int

    @property
    def drop(self) -> float:
        """Points of top-1 lost."""
        return self.baseline_top1 - self.top1

    @property
    def standard_error(self) -> float:
        """Of top-1, in points: how far it may be off for want of images."""
        share = self.top1 / 100
        return 100 * (share * (1 - share) / self.images) ** 0.5


def planned_hidings(model: nn.Module, sides: Sequence[int]) -> list[Hiding]:
    """Nothing; then for each side the neighbourhood and random tokens, with the 3×3 term both kept and hidden."""
    has_local_term = any(
        getattr(layer, "residual", None) is not None or getattr(layer, "static_local", None) is not None
        for layer in attention_layers(model).values()
    )
    local_terms: tuple[LocalTerm, ...] = ("hidden", "kept") if has_local_term else ("none",)
    hidings = [Hiding("nothing", 0, "kept" if has_local_term else "none")]
    wheres: tuple[Where, ...] = ("neighbourhood", "random")
    return hidings + [Hiding(where, side, local) for local in local_terms for side in sides for where in wheres]


def measure_masking(
    model: nn.Module,
    batches: Callable[[], Iterable[Batch]],
    *,
    sides: Sequence[int] = (3, 5, 7),
    seed: int = 0,
    on_progress: Callable[[MaskingResult], None] | None = None,
) -> list[MaskingResult]:
    """Evaluate a classifier under every hiding.

    Args:
        model: The classifier, in evaluation mode.
        batches: Labelled images, normalised and on the model's device; called once per hiding.
        sides: Of neighbourhoods, in tokens.
        seed: Of the random tokens.
        on_progress: Called with each result.

    Raises:
        ValueError: If there is no image.
    """
    results: list[MaskingResult] = []
    for hiding in planned_hidings(model, sides):
        with hidden_tokens(model, hiding, seed=seed):
            right, images = count_right(model, batches())
        top1 = 100 * right / images
        results.append(MaskingResult(hiding, top1, results[0].top1 if results else top1, images))
        if on_progress is not None:
            on_progress(results[-1])
    return results


@torch.no_grad()
def count_right(model: nn.Module, batches: Iterable[Batch]) -> tuple[int, int]:
    """How many images a classifier names rightly, of how many."""
    right = images = 0
    for batch in batches:
        right += int((model(batch.images).argmax(1) == batch.targets).sum())
        images += len(batch)
    if images == 0:
        raise ValueError("there is no image to evaluate on; check --data-dir and --split")
    return right, images


@contextmanager
def hidden_tokens(model: nn.Module, hiding: Hiding, *, seed: int = 0) -> Iterator[None]:
    """While inside, the model's attention layers keep from each query what `hiding` says.

    Random tokens are drawn anew for every layer and batch, from the seed.
    """
    if hiding.where == "nothing":
        yield
        return
    generator = torch.Generator().manual_seed(derived_seed("masking", seed, hiding.side))

    def mix(layer: LayerAttention) -> Tensor:
        hide = hidden_keys(layer, hiding, generator)
        return mixed_values(layer, hide, hide_from_local_term=hiding.local_term == "hidden")

    with observed(model, mix):
        yield


def hidden_keys(layer: LayerAttention, hiding: Hiding, generator: torch.Generator) -> Tensor:
    """`[H, N, N]` bool, True where a key is hidden from a query.

    At random, each query loses as many keys as its neighbourhood has, of those on the grid that it can see: fewer at
    the border, and none for prefix tokens, which have no neighbourhood.
    """
    device = layer.q.device
    near = neighbourhood_mask(layer.grid_size, layer.num_prefix_tokens, hiding.side, device)
    masks: list[Tensor] = []
    for head in range(layer.num_heads):
        if layer.groups is None and masks:  # all heads see the same keys, and lose the same
            masks.append(masks[0])
            continue
        reach = layer.reach(head)
        hide = near if reach is None else near & reach
        if hiding.where == "random":
            candidates = torch.ones_like(hide) if reach is None else reach.clone()
            candidates[:, : layer.num_prefix_tokens] = False
            draw = torch.rand(hide.shape, generator=generator).to(device).masked_fill(~candidates, 2.0)
            hide = draw.argsort(1).argsort(1) < hide.sum(1, keepdim=True)
        masks.append(hide)
    return torch.stack(masks)


def mixed_values(layer: LayerAttention, hidden: Tensor | None = None, *, hide_from_local_term: bool = True) -> Tensor:
    """What the layer hands to its output projection, `[B, N, C]`, through explicit weights.

    Args:
        layer: The layer.
        hidden: `[H, N, N]` bool, True where a key is hidden from a query; nothing by default.
        hide_from_local_term: Whether the 3×3 term, too, leaves out what is hidden.
    """
    dtype = torch.promote_types(layer.v.dtype, torch.float32)
    at_once = max(1, BYTES_AT_ONCE // (layer.num_tokens**2 * dtype.itemsize))
    out = torch.empty_like(layer.v)
    for head in range(layer.num_heads):
        hide = None if hidden is None else hidden[head]
        for start in range(0, layer.batch_size, at_once):
            images = slice(start, start + at_once)
            weights = layer.rows(images, head, hidden=hide, dtype=dtype)
            mixed = (weights @ layer.v[images, :, head].to(dtype)).to(out.dtype)
            local = layer.local_term(images, head, hide if hide_from_local_term else None)
            out[images, :, head] = mixed if local is None else mixed + local
    return out.flatten(2)
