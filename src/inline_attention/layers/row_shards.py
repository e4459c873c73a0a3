"""Context parallelism: the rows of each image over the ranks of a group, and what the ranks exchange.

Every rank runs the same operations on its rows. There are two collectives: `ContextGroup.gather` for sums and states,
which are small, and `RowShards.take` for rows that other ranks have. Autograd runs their transposes, so the backward
pass computes the gradient of the sum of all ranks' losses with respect to each rank's own copy of the weights. All
ranks of a group compute the same loss. Hence the mean of the gradients over the group is the gradient of the loss,
even of what several ranks compute, such as class tokens: average gradients over all ranks, as DDP and FSDP2 do.

Shapes: `B` batch, `C` channels, `H`, `W` height and width of a map.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inline_attention.layers.grids import Grid

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RowRange = tuple[int, int]  # first row and the row after the last


class ContextGroup:
    """The ranks that share the rows of each image: a device mesh of one dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def __deepcopy__(self, memo: Any) -> ContextGroup:
        return self  # a copied model, such as averaged weights, stays in the group

    def place(self, images: Tensor, whole: Grid) -> tuple[Tensor, RowShards]:
        """Return this rank's rows of images `[B, C, H, W]`, and their grid.

        A DTensor has them already. A plain tensor has all rows, and the first layer reads those it needs.
        """
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(images, DTensor):
            return images, RowShards(whole, self, whole_rows(whole, self))
        if images.placements != (Shard(2),) or images.device_mesh.size() != self.size:
            raise ValueError(
                f"images must be sharded by rows over the {self.size} ranks of the model, got {images.placements} over "
                f"{images.device_mesh.size()}; use shard_rows(images, mesh)"
            )
        height = whole.size[0]
        step = -(-height // self.size)  # DTensor's shares: the last ranks may have fewer rows, or none
        edges = [min(step * rank, height) for rank in range(self.size + 1)]
        return images.to_local(), RowShards(whole, self, list(itertools.pairwise(edges)))

    def gather(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the tensors of each rank. All are `[B, ...]` and of one dtype; they travel in one message."""
        collectives = _functional_collectives()
        # PyTorch 2.15 has renamed it.
        all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
        flat = [tensor.flatten(1) for tensor in tensors]
        gathered: Tensor = all_gather(torch.cat(flat, dim=1).contiguous(), 0, self.mesh)
        parts = torch.split(gathered, [part.shape[1] for part in flat], dim=1)
        shaped = [part.reshape(self.size, *tensor.shape).unbind(0) for part, tensor in zip(parts, tensors, strict=True)]
        return list(zip(*shaped, strict=True))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `[B, ...]` over the ranks, in the order of ranks: the same bits on all of them."""
        return torch.stack([part for (part,) in self.gather(tensor)]).sum(0)

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send `sent[rank]` to each rank. Returns what came from each, of the given shapes."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.cat([part.reshape(-1) for part in sent])
        all_to_all = _functional_collectives().all_to_all_single_autograd
        received: Tensor = all_to_all(flat, sizes, [part.numel() for part in sent], self.mesh)
        return [part.reshape(shape) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]


class RowShards(Grid):
    """The rows of a grid that this rank has, and those of the others.

    `size`, `extents` and `mask` are those of this rank's rows. A grid with fewer rows than ranks is not split: every
    rank has all rows and computes the same.
    """

    def __init__(self, whole: Grid, group: ContextGroup, ranges: Sequence[RowRange] | None = None) -> None:
        height, width = whole.size
        if ranges is None:
            edges = [height * rank // group.size for rank in range(group.size + 1)]
            ranges = list(itertools.pairwise(edges)) if height >= group.size else whole_rows(whole, group)
        first, end = ranges[group.rank]
        super().__init__(end - first, width, None, whole.device)
        if whole.extents is not None:
            self.extents = tuple((min(max(rows - first, 0), end - first), columns) for rows, columns in whole.extents)
        self.whole, self.group, self.ranges, self.first_row = whole, group, tuple(ranges), first
        self.is_split = len(set(ranges)) > 1

    def coarser(self, stride: int) -> RowShards:
        """The grid after a merging of stride×stride tokens, in shares of its own."""
        return RowShards(self.whole.coarser(stride), self.group)

    def take(self, x: Tensor, wanted: Sequence[RowRange], dim: int = 1) -> Tensor:
        """Return other rows than this rank has.

        Args:
            x: This rank's rows along `dim`.
            wanted: The rows of the whole grid that each rank shall have. Beyond the edge they are zeros.
            dim: Dimension of the rows.
        """
        rank, height = self.group.rank, self.whole.size[0]
        first, end = wanted[rank]
        pieces = (
            self._pieces(x, wanted, dim) if self.is_split else [_rows(x, dim, 0, _overlap((0, height), (first, end)))]
        )
        for place, missing in ((0, min(end, 0) - first), (len(pieces) + 1, end - max(first, height))):
            if missing > 0:
                shape = list(x.shape)
                shape[dim] = missing
                pieces.insert(place, x.new_zeros(shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def take_tokens(self, tokens: Tensor, wanted: Sequence[RowRange]) -> Tensor:
        """`take` for tokens `[B, rows · W, ...]`."""
        return self.take(torch.unflatten(tokens, 1, self.size), wanted).flatten(1, 2)

    def take_for(self, x: Tensor, coarser: Grid, kernel: int, stride: int, padding: int = 0) -> Tensor:
        """Return the rows of a map `[B, C, H, W]` that a convolution needs for this rank's rows of its output.

        They include the rows of its zero padding.
        """
        assert isinstance(coarser, RowShards)
        wanted = [(first * stride - padding, (end - 1) * stride - padding + kernel) for first, end in coarser.ranges]
        return self.take(x, wanted, dim=2)

    def windows(self, height: int, offset: int = 0) -> list[RowRange]:
        """Return the rows of all windows of a height that touch each rank's rows; the first starts at `-offset`."""
        return [
            ((first + offset) // height * height - offset, -(-(end + offset) // height) * height - offset)
            for first, end in self.ranges
        ]

    def own_tokens(self, tokens: Tensor, rows: RowRange) -> Tensor:
        """Return this rank's tokens `[B, N, ...]` from those of more rows."""
        width, first = self.size[1], self.first_row - rows[0]
        return tokens[:, first * width : (first + self.size[0]) * width]

    def gather_tokens(self, tokens: Tensor, num_prefix_tokens: int) -> tuple[Tensor, Grid]:
        """Return the tokens of all ranks, and their grid. Prefix tokens are the same on all."""
        if not self.is_split:
            return tokens, self.whole
        rows = self.take_tokens(tokens[:, num_prefix_tokens:], whole_rows(self.whole, self.group))
        return torch.cat([tokens[:, :num_prefix_tokens], rows], dim=1), self.whole

    def mask_of(self, rows: RowRange) -> Tensor | None:
        """`[1 or B, rows · W]` bool, True for real tokens of any rows of the whole grid; None when all are."""
        height, width = self.whole.size
        if self.whole.extents is None and rows[0] >= 0 and rows[1] <= height:
            return None
        extents = torch.tensor(self.whole.extents or [self.whole.size], device=self.device)
        row, column = torch.arange(*rows, device=self.device), torch.arange(width, device=self.device)
        is_row = (row >= 0) & (row < extents[:, :1])
        return (is_row[:, :, None] & (column < extents[:, 1:])[:, None, :]).flatten(1)

    def _pieces(self, x: Tensor, wanted: Sequence[RowRange], dim: int) -> list[Tensor]:
        """Return what each rank has of this rank's wanted rows, in order."""
        rank, ranks = self.group.rank, range(self.group.size)
        first = self.ranges[rank][0]
        own = _rows(x, dim, first, _overlap(self.ranges[rank], wanted[rank]))
        # All ranks must decide alike.
        moves = [(i, j) for i in ranks for j in ranks if i != j and _length(_overlap(self.ranges[i], wanted[j]))]
        if not moves:
            return [own]
        sent = [
            _rows(x, dim, first, _overlap(self.ranges[rank], wanted[peer]) if peer != rank else (0, 0))
            for peer in ranks
        ]
        shapes = [list(x.shape) for _ in ranks]
        for peer in ranks:
            shapes[peer][dim] = _length(_overlap(self.ranges[peer], wanted[rank])) if peer != rank else 0
        pieces = self.group.exchange(sent, shapes)
        # Empty pieces stay: their backward pass is this rank's part in the exchange of gradients.
        return [*pieces[:rank], own, *pieces[rank:]]


def whole_rows(whole: Grid, group: ContextGroup) -> list[RowRange]:
    """Return the ranges of ranks that all have all rows."""
    return [(0, whole.size[0])] * group.size


def _functional_collectives() -> Any:
    import torch.distributed._functional_collectives as collectives  # takes a second

    return collectives


def _overlap(one: RowRange, other: RowRange) -> RowRange:
    return max(one[0], other[0]), min(one[1], other[1])


def _length(rows: RowRange) -> int:
    return max(rows[1] - rows[0], 0)


def _rows(x: Tensor, dim: int, first: int, rows: RowRange) -> Tensor:
    """Return rows of the whole grid from a tensor that starts with row `first`; none if they end before they start."""
    length = _length(rows)
    return x.narrow(dim, rows[0] - first if length else 0, length)
