"""How often, on real images, different queries get the same attention: the paper's count of confusions.

Two queries of one head are *confused* when their rows of weights coincide although the queries differ:

    ‖w - w'‖ ≤ t · max(‖w - u‖, ‖w' - u‖)   although   ‖q - q'‖ > 0.1 · max(‖q‖, ‖q'‖)

where u is uniform attention: w - u is what a query says about the keys at all. Both sides are relative, so that neither
the number of tokens nor the scale of a layer decides: rows that are all nearly uniform, as those of untrained models,
are not confused for that reason; rows that are exactly uniform are. Counts are kept for several tolerances t, since
no single one is right.

Shapes: `N` tokens, which are all queries, `T` tolerances.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inline_attention.analysis.explicit import AttentionKind, beyond_uniform, check_matrix_size
from inline_attention.analysis.layer_attention import LayerAttention

TOLERANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TOLERANCE = 1e-2
DISTINCT_QUERIES = 0.1


@dataclass(frozen=True)
class ConfusionCount:
    """The confused pairs of one head of one image.

    Attributes:
        image: Name of the image.
        layer: Number of the layer.
        head: Number of the head.
        attention: The layer's.
        tokens: N.
        distinct_pairs: Pairs of queries that differ.
        confused_pairs: Those of them whose rows coincide, at the tolerance asked for.
        confused_tokens: Tokens that take part in at least one such pair.
        by_tolerance: Confused pairs at each of `TOLERANCES`.
    """

    image: str
    layer: int
    head: int
    attention: AttentionKind
    tokens: int
    distinct_pairs: int
    confused_pairs: int
    confused_tokens: int
    by_tolerance: tuple[int, ...]


@dataclass(frozen=True)
class ConfusedImage:
    """An image to show.

    Attributes:
        name: Of the image.
        pixels: `[3, H, W]` uint8.
        pairs: Confused pairs over all layers and heads.
        layer: Layer of the worst head.
        head: The worst head: most confused pairs.
        grid_size: (h, w) of that layer.
        groups: `[h, w]`: grid tokens of equal positive number are confused with each other there; 0 for those that
            are confused with none. The largest group has number 1.
    """

    name: str
    pixels: Tensor
    pairs: int
    layer: int
    head: int
    grid_size: tuple[int, int]
    groups: Tensor


@dataclass
class WorstImages:
    """The images with most confused pairs met so far; memory does not grow with the number of images."""

    limit: int
    _heap: list[tuple[int, int, ConfusedImage]] = field(default_factory=list)
    _seen: int = 0

    def add(self, image: ConfusedImage) -> None:
        """Keep it if it is among the worst."""
        self._seen += 1  # a tie goes to the image met first
        heapq.heappush(self._heap, (image.pairs, -self._seen, image))
        if len(self._heap) > self.limit:
            heapq.heappop(self._heap)

    def sorted(self) -> list[ConfusedImage]:
        """The worst first; images without any confusion are left out."""
        return [image for pairs, _, image in sorted(self._heap, reverse=True) if pairs > 0]


def count_confusion(
    layer: LayerAttention, image: int, head: int, name: str = "", *, tolerance: float = TOLERANCE
) -> tuple[ConfusionCount, Tensor]:
    """Count the confused pairs of one head of one image.

    Args:
        layer: The layer.
        image: Number in the batch.
        head: Number of the head.
        name: Of the image, for the result.
        tolerance: t.

    Returns:
        The count, and `[N, N]` bool which pairs are confused.

    Raises:
        MatrixTooLargeError: If there are too many tokens to write all weights out.
    """
    check_matrix_size(layer.num_tokens, layer.num_tokens)
    distinct = pairwise_difference(layer.q[image, :, head].double()) > DISTINCT_QUERIES
    difference = pairwise_difference(_said_by_rows(layer, image, head)).masked_fill_(~distinct, torch.inf)
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
    """‖a - b‖ over the longer of a and b for all pairs of rows `[N, M]`, `[N, N]`; 0 where both are zero."""
    lengths = rows.norm(dim=1)
    # Through inner products, which is fast: exact to about 1e-8 of the lengths in float64, well below the tolerances.
    squares = lengths[:, None] ** 2 + lengths[None, :] ** 2 - 2 * rows @ rows.T
    difference = squares.clamp_(min=0).sqrt_()
    difference /= torch.maximum(lengths[:, None], lengths[None, :]).clamp(min=torch.finfo(rows.dtype).tiny)
    return difference.fill_diagonal_(0)


def _said_by_rows(layer: LayerAttention, image: int, head: int) -> Tensor:
    """Rows less uniform attention to the keys in sight, `[N, N]`."""
    reach = layer.reach(head)
    uniform = 1 / layer.num_tokens if reach is None else reach / reach.sum(1, keepdim=True)
    return beyond_uniform(layer.rows(image, head), uniform)


def confused_image(
    name: str, pixels: Tensor, pairs: int, layer: LayerAttention, head: int, confused: Tensor
) -> ConfusedImage:
    """An image with its confused tokens, from the pairs `[N, N]` of its worst head."""
    groups = connected_groups(confused)[layer.num_prefix_tokens :].view(layer.grid_size)
    return ConfusedImage(name, pixels, pairs, layer.index, head, layer.grid_size, groups)


def connected_groups(confused: Tensor) -> Tensor:
    """Numbers `[N]` of the groups that pairs `[N, N]` connect, the largest group being 1; 0 for single tokens."""
    count = len(confused)
    label = torch.arange(count, device=confused.device)
    linked = confused | torch.eye(count, dtype=torch.bool, device=confused.device)
    while True:
        spread = torch.where(linked, label[None, :], count).min(1).values
        if torch.equal(spread, label):
            break
        label = spread
    _, inverse, sizes = label.unique(return_inverse=True, return_counts=True)
    order = sizes.argsort(descending=True, stable=True)
    number = torch.zeros_like(sizes)
    number[order] = torch.arange(1, len(sizes) + 1, device=sizes.device)
    return torch.where(sizes[inverse] > 1, number[inverse], 0).cpu()


def pairs_per_image(counts: Sequence[ConfusionCount]) -> dict[str, int]:
    """Confused pairs of each image over all layers and heads."""
    totals: dict[str, int] = {}
    for count in counts:
        totals[count.image] = totals.get(count.image, 0) + count.confused_pairs
    return totals
