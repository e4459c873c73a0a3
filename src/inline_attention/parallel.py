"""Context parallelism: the rows of each image over the ranks of a device mesh (docs/gigapixel_parallel.md).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "context"))
    parallelize_context(model, mesh["context"])
    model = DistributedDataParallel(model)      # or fully_shard(model): gradients are averaged over all ranks
    logits = model(images)                      # whole images, or shard_rows(images, mesh["context"])

Outputs and gradients are those of one process. Nothing else changes: parameters and checkpoints are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from inline_attention.layers.row_shards import ContextGroup
from inline_attention.models.base import VisionModel, blocks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["own_rows", "parallelize_context", "shard_rows"]


def parallelize_context(model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """Share the rows of each image between the ranks of a mesh, in place.

    Every rank of the mesh must call the model with the same images, and gets the same output. Gradients on a rank are
    its part: average them over all ranks of the run, as DistributedDataParallel and fully_shard do. Seed the ranks
    of the mesh alike: stochastic depth must drop the same images on all of them.

    Args:
        model: A model of this library, or a module that contains one.
        mesh: Device mesh of one dimension, such as `mesh["context"]`; None to undo.

    Returns:
        The model.

    Raises:
        ValueError: A mesh of several dimensions, a module without such a model, or one with dropout of tokens.
    """
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f'mesh must have one dimension, got {mesh.ndim}; pass one of them, such as mesh["context"]')
    if (reason := unsupported_reason(model)) is not None:
        raise ValueError(reason)
    group = None if mesh is None else ContextGroup(mesh)
    for backbone in _backbones(model):
        backbone.context_group = group
    return model


def unsupported_reason(model: nn.Module) -> str | None:
    """Return why ranks cannot share the rows of a model's images; None if they can."""
    backbones = _backbones(model)
    if not backbones:
        return (
            "expected a model of this library (inline_deit_*, inline_pvt_*, inline_swin_*, inline_cswin_*), got "
            f"{type(model).__name__}; create one with inline_attention.create_model"
        )
    for module in (block for backbone in backbones for blocks in blocks_of(backbone) for block in blocks.modules()):
        rate = getattr(module, "attn_drop_rate", module.p if isinstance(module, nn.Dropout) else 0.0)
        if rate > 0:
            return (
                f"dropout of tokens would differ between ranks, got a rate of {rate}; create the model with "
                "proj_drop_rate=0 and attn_drop_rate=0 (drop_path_rate and drop_rate are possible)"
            )
    return None


def _backbones(model: nn.Module) -> list[VisionModel]:
    return [module for module in model.modules() if isinstance(module, VisionModel)]


def own_rows(height: int, mesh: DeviceMesh) -> slice:
    """Return the rows of an image that this rank reads, for `shard_rows`."""
    step = -(-height // mesh.size())
    first = min(step * mesh.get_local_rank(), height)
    return slice(first, min(first + step, height))


def shard_rows(images: Tensor, mesh: DeviceMesh, height: int | None = None) -> DTensor:
    """Return images as a DTensor that is sharded by rows. Nothing is sent.

    Args:
        images: Whole images `[B, C, H, W]`; with `height`, only the `own_rows(height, mesh)` of this rank.
        mesh: Device mesh of one dimension.
        height: Height H of the whole images, if `images` are rows of them.
    """
    from torch.distributed.tensor import DTensor, Shard

    rows = own_rows(images.shape[2] if height is None else height, mesh)
    local = images[:, :, rows] if height is None else images
    if local.shape[2] != rows.stop - rows.start:
        raise ValueError(
            f"expected {rows.stop - rows.start} rows, {rows.start} to {rows.stop} of {height}, got {local.shape[2]}; "
            "read own_rows(height, mesh)"
        )
    shape = torch.Size((*local.shape[:2], images.shape[2] if height is None else height, local.shape[3]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
