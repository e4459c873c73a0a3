"""What each rank does in the tests of context parallelism: compare models on shared rows with models on all rows."""

import copy
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from inline_attention.layers.row_shards import ContextGroup
from inline_attention.models import pvt
from inline_attention.models.cswin import InLineCSWin
from inline_attention.models.deit import InLineDeiT
from inline_attention.models.pvt import InLinePVT
from inline_attention.models.swin import InLineSwin
from inline_attention.parallel import own_rows, parallelize_context, shard_rows

CLASSES = 5
FAMILIES = ("deit", "pvt", "swin", "cswin")
STATIC = {"static_local": True, "local_residual": False}
CLASS_SOFTMAX = {"softmax_prefix": True, "prefix_gain": True}
MAGNITUDE = {"normalization": "magnitude", "feature_map": "exp"}
SMALL = (2, 3, 72, 40)  # pyramids of 18, 9, 5 and 3 rows: four ranks cannot share the last
LARGE = (2, 3, 136, 40)  # 34, 17, 9 and 5 rows
PADDED = [(136, 40), (44, 33)]  # the second image has no rows on some ranks


def tiny(family, *, dtype=torch.float64, **options):
    """A model of a family with all kinds of its layers; in float64 with weights that make every term matter."""
    pvt.DIMS, pvt.HEADS, pvt.MLP_RATIOS = (4, 4, 8, 8), (1, 2, 2, 2), (1, 1, 1, 1)
    options |= {"num_classes": CLASSES}
    makers = {
        "deit": lambda: InLineDeiT(8, 2, img_size=48, patch_size=8, depth=2, mlp_ratio=1, **options),
        "pvt": lambda: InLinePVT((1, 1, 1, 1), img_size=64, **options),
        "swin": lambda: InLineSwin(4, (1, 2, 2, 2), (1, 1, 2, 2), (1, 1, 0, 0), window_size=3, mlp_ratio=1, **options),
        "cswin": lambda: InLineCSWin(
            4, (1, 1, 1, 1), (2, 2, 2, 2), global_stages=1, stripe_widths=(1, 2, 3), mlp_ratio=1, **options
        ),
    }
    torch.manual_seed(0)
    model = makers[family]().to(dtype)
    for parameter in model.parameters() if dtype == torch.float64 else ():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


# Family, model options, shape of the images, image sizes of a padded batch.
CASES = {
    **{f"{family} {shape[2]} rows": (family, {}, shape, None) for family in FAMILIES for shape in (SMALL, LARGE)},
    **{f"{family} padded": (family, {}, LARGE, PADDED) for family in FAMILIES},
    **{f"{family} softmax": (family, {"attention": "softmax"}, LARGE, None) for family in ("deit", "swin", "cswin")},
    "deit softmax padded": ("deit", {"attention": "softmax"}, LARGE, PADDED),
    "deit linear": ("deit", {"attention": "linear"}, LARGE, None),
    "deit mean pooling": ("deit", {"global_pool": "avg"}, LARGE, PADDED),
    "deit without pooling": ("deit", {"global_pool": ""}, LARGE, None),
    "deit, learned 3×3": ("deit", {"attention_options": STATIC}, SMALL, None),
    "deit, softmax of the class token": ("deit", {"attention_options": CLASS_SOFTMAX}, LARGE, PADDED),
    "deit, magnitude": ("deit", {"attention_options": MAGNITUDE}, SMALL, None),
}  # fmt: skip


@contextmanager
def joined(rank, ranks):
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compare(ranks, rank):
    """The largest differences of each case, relative to the largest number: of outputs, gradients, image gradients."""
    with joined(rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
        found = {name: compare_case(mesh, *case) for name, case in CASES.items()}
        for family in FAMILIES:
            found[f"{family} float32"] = compare_case(mesh, family, {}, SMALL, None, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            found["bfloat16"] = compare_case(mesh, "cswin", {}, LARGE, PADDED, dtype=torch.float32)
        found["sharded images"] = compare_case(mesh, "deit", {}, (2, 3, 41, 40), None, sharded=True)
        found["recomputed blocks"] = compare_case(mesh, "swin", {}, LARGE, None, recomputed=True)
        found["stochastic depth"] = compare_case(mesh, "deit", {"drop_path_rate": 0.5}, LARGE, None)
        found["features"] = compare_features(mesh)
        found["copy"] = compare_case(mesh, "deit", {}, SMALL, None, copied=True)
        return found


def compare_case(
    mesh, family, options, shape, image_sizes, *, dtype=torch.float64, sharded=False, recomputed=False, copied=False
):
    model = tiny(family, dtype=dtype, **options)
    model.set_grad_checkpointing(recomputed)
    images = torch.randn(shape, dtype=dtype, requires_grad=True)
    expected = outputs_and_gradients(model, images, images, image_sizes)
    parallelize_context(model, mesh)
    if copied:
        model = copy.deepcopy(model)
    given = images
    if sharded:
        height = shape[2]
        given = shard_rows(images[:, :, own_rows(height, mesh)], mesh, height)
    found = outputs_and_gradients(model, given, images, image_sizes)
    for gradient in found[1:]:
        dist.all_reduce(gradient)
        gradient /= mesh.size()
    return [relative_difference(a, b) for a, b in zip(found, expected, strict=True)]


def outputs_and_gradients(model, given, images, image_sizes):
    """Outputs, gradients of all weights, and of the images."""
    images.grad = None
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    outputs = model(given, image_sizes=image_sizes)
    weighted_sum(outputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # else DDP would wait for it
    return outputs.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()]), images.grad


def weighted_sum(outputs):
    return (outputs * torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)).sum()


def compare_features(mesh):
    """Feature maps are whole on every rank."""
    model = tiny("swin").eval()
    images = torch.randn(LARGE, dtype=torch.float64)
    with torch.no_grad():
        expected = [
            model.forward_features(images, PADDED),
            *model.forward_intermediates(images, intermediates_only=True),
        ]
        parallelize_context(model, mesh)
        found = [model.forward_features(images, PADDED), *model.forward_intermediates(images, intermediates_only=True)]
        parallelize_context(model, None)
        found.append(model(images))
        expected.append(model(images))
    return [relative_difference(a, b) for a, b in zip(found, expected, strict=True)]


def relative_difference(found, expected):
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


def count_bytes(ranks, rank):
    """Bytes that each collective of a forward pass of one DeiT block gets from this rank."""
    counted = []
    gather, exchange = ContextGroup.gather, ContextGroup.exchange

    def counting_gather(self, *tensors):
        counted.append(("gather", sum(tensor.nbytes for tensor in tensors)))
        return gather(self, *tensors)

    def counting_exchange(self, sent, shapes):
        counted.append(("exchange", sum(part.nbytes for part in sent)))
        return exchange(self, sent, shapes)

    ContextGroup.gather, ContextGroup.exchange = counting_gather, counting_exchange
    with joined(rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
        model = parallelize_context(tiny("deit"), mesh)
        model(torch.randn(LARGE, dtype=torch.float64))
    return counted


def compare_strategies(rank):
    """Differences of gradients with DDP, FSDP2 over all ranks, and FSDP2 over the ranks with other images.

    Two groups of two ranks; each group has its own images, and the gradient is the mean over both.
    """
    with joined(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        beside = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))
        torch.manual_seed(0)  # the same images in all ranks
        batches = [torch.randn(LARGE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        expected = sum(outputs_and_gradients(tiny("swin"), images, images, None)[1] for images in batches) / 2
        found = {}
        for name, own_mesh, wrap in (
            ("ddp", mesh, DistributedDataParallel),
            ("fsdp2", mesh, shard),
            ("fsdp2 beside context", beside, partial(shard, mesh=beside)),
        ):
            model = parallelize_context(tiny("swin"), own_mesh["context"])
            wrapped = wrap(model)
            weighted_sum(wrapped(batches[own_mesh["data"].get_local_rank()])).backward()
            gradients = [weight.grad for weight in model.parameters()]
            whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in gradients]
            found[name] = relative_difference(torch.cat([gradient.flatten() for gradient in whole]), expected)
        return found


def shard(model, **options):
    for stage in model.stages:
        for block in stage:
            fully_shard(block, **options)
    return fully_shard(model, **options)
