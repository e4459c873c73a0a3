"""The paper's detectors on COCO and segmenters on ADE20K.

    inline train mask_rcnn_inline_pvt_tiny_1x --data-dir COCO --initial-checkpoint FILE
    inline train semantic_fpn_inline_pvt_tiny_80k --data-dir ADEChallengeData2016 --initial-checkpoint FILE

FILE holds the weights of the backbone, from `inline train pvt_tiny` or `inline convert`. The paper's figures need it;
without it training starts from random weights.

Mask R-CNN trains for 12 and 36 epochs (1x, 3x) and RetinaNet for 12: sixteen images per update, AdamW at 1e-4, divided
by ten after 8 and 11 of 12 epochs, or 27 and 33 of 36. Images have 800 × 1333 pixels; for 3x the shorter side is 480 to
800. Semantic FPN on PVT trains for 80,000 updates, UPerNet on Swin for 160,000: sixteen crops of 512 × 512 pixels per
update, AdamW at 2e-4 and 6e-5, polynomial decay to zero. Weight decay, the power of the polynomial and the warm-up are
those of the backbones' authors; the paper does not give them. It has no Faster R-CNN either: these recipes have the
settings of Mask R-CNN, for data without masks. The stochastic depth rate is that of the backbone on
ImageNet.
"""

from __future__ import annotations

from typing import Any

from inline_attention.recipes.imagenet import MODELS
from inline_attention.recipes.recipe import Recipe

SIZES = {"pvt": ("tiny", "small", "medium", "large"), "swin": ("tiny", "small", "base")}
IMAGES_PER_UPDATE, GPUS = 16, 8
BATCHES = {"batch_size": IMAGES_PER_UPDATE // GPUS, "total_batch_size": IMAGES_PER_UPDATE}
DETECTORS = {"mask_rcnn": "Mask R-CNN", "faster_rcnn": "Faster R-CNN", "retinanet": "RetinaNet"}
# length: (epochs, epochs after which the learning rate falls, smallest shorter side)
LENGTHS: dict[str, tuple[int, tuple[int, int], int | None]] = {"1x": (12, (8, 11), None), "3x": (36, (27, 33), 480)}
DETECTION_DECAY = {"pvt": 1e-4, "swin": 0.05}
# family: (head, title, updates, learning rate, weight decay, schedule)
SEGMENTERS: dict[str, tuple[str, str, int, float, float, dict[str, Any]]] = {
    "pvt": ("semantic_fpn", "Semantic FPN", 80_000, 2e-4, 1e-4, {"decay_rate": 0.9, "warmup_epochs": 0}),
    "swin": ("upernet", "UPerNet", 160_000, 6e-5, 0.01,
             {"decay_rate": 1.0, "warmup_updates": 1500, "warmup_lr": 6e-11}),
}  # fmt: skip
EPOCHS_BETWEEN_EVALUATIONS = 6  # of 1263 updates each


def _detection(head: str, length: str, family: str, size: str) -> Recipe:
    backbone, (epochs, milestones, multi_scale_from) = f"inline_{family}_{size}", LENGTHS[length]
    return Recipe(
        f"{head}_{backbone}_{length}",
        f"{DETECTORS[head]} on {backbone}, COCO, {epochs} epochs",
        {
            "task": {"name": "detection"},
            "model": {"name": backbone, "drop_path": MODELS[f"{family}_{size}"][2]},
            "data": {"dataset": "coco"},
            "detection": {"head": head, "multi_scale_from": multi_scale_from},
            "optimizer": {"lr": 1e-4, "lr_base_size": IMAGES_PER_UPDATE, "weight_decay": DETECTION_DECAY[family]},
            "schedule": {
                "name": "multistep", "decay_milestones": milestones, "warmup_updates": 500, "warmup_lr": 1e-7
            },
            "training": {"epochs": epochs, **BATCHES},
        },
        data="COCO",
    )  # fmt: skip


def _segmentation(family: str, size: str) -> Recipe:
    head, title, updates, lr, weight_decay, schedule = SEGMENTERS[family]
    backbone = f"inline_{family}_{size}"
    return Recipe(
        f"{head}_{backbone}_{updates // 1000}k",
        f"{title} on {backbone}, ADE20K, {updates:,} updates",
        {
            "task": {"name": "segmentation"},
            "model": {"name": backbone, "drop_path": MODELS[f"{family}_{size}"][2]},
            "data": {"dataset": "pairs", "reduce_zero_label": True},
            "segmentation": {"head": head},
            "optimizer": {"lr": lr, "lr_base_size": IMAGES_PER_UPDATE, "weight_decay": weight_decay},
            "schedule": {"name": "poly", "min_lr": 0.0, **schedule},
            "training": {"updates": updates, "validation_interval": EPOCHS_BETWEEN_EVALUATIONS, **BATCHES},
        },
        data="ADE20K",
    )


BACKBONES = [(family, size) for family, sizes in SIZES.items() for size in sizes]
RECIPES = (
    *(
        _detection(head, length, *backbone)
        for head, length in (("mask_rcnn", "1x"), ("mask_rcnn", "3x"), ("faster_rcnn", "1x"), ("retinanet", "1x"))
        for backbone in BACKBONES
    ),
    *(_segmentation(*backbone) for backbone in BACKBONES),
)
