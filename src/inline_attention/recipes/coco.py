"""The paper's detectors on COCO: Mask R-CNN in 12 and 36 epochs (1×, 3×) and RetinaNet in 12, on PVT and Swin.

    inline train mask_rcnn_inline_pvt_tiny_1x --data-dir COCO --initial-checkpoint FILE

The file is of the backbone as `inline train pvt_tiny` or `inline convert` writes it; the paper's figures need one, and
without it training starts from random weights. Sixteen images an update, AdamW at 1e-4, divided by ten after 8 and 11
of 12 epochs, or 27 and 33 of 36; images of 800 × 1333 pixels, for 3× of 480 to 800. What the paper does not say is as
the authors of the backbones have it: weight decay, and 500 updates of warm-up.
"""

from __future__ import annotations

from inline_attention.engine.config import (
    DataSection,
    DetectionSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TaskSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.recipes.recipe import Recipe

SIZES = {"pvt": ("tiny", "small", "medium", "large"), "swin": ("tiny", "small", "base")}
WEIGHT_DECAY = {"pvt": 1e-4, "swin": 0.05}
MILESTONES = {"1x": (8, 11), "3x": (27, 33)}
EPOCHS = {"1x": 12, "3x": 36}
SMALLEST_SHORTER_SIDE = 480  # of 3×
TOTAL_BATCH, GPUS = 16, 8
TITLES = {"mask_rcnn": "Mask R-CNN", "retinanet": "RetinaNet"}


def detection_recipe(head: str, family: str, size: str, length: str) -> Recipe:
    """One of them.

    Args:
        head: "mask_rcnn" or "retinanet".
        family: Of the backbone.
        size: Of the backbone.
        length: "1x" or "3x".
    """
    backbone = f"inline_{family}_{size}"
    config = TrainConfig(
        task=TaskSection(name="detection"),
        model=ModelSection(name=backbone),
        data=DataSection(dataset="coco"),
        detection=DetectionSection(
            head="mask_rcnn" if head == "mask_rcnn" else "retinanet",
            multi_scale_from=SMALLEST_SHORTER_SIDE if length == "3x" else None,
        ),
        optimizer=OptimizerSection(lr=1e-4, lr_base_size=TOTAL_BATCH, weight_decay=WEIGHT_DECAY[family]),
        schedule=ScheduleSection(
            name="multistep", decay_milestones=MILESTONES[length], warmup_updates=500, warmup_lr=1e-7
        ),
        training=TrainingSection(epochs=EPOCHS[length], batch_size=TOTAL_BATCH // GPUS, total_batch_size=TOTAL_BATCH),
    )
    summary = f"{TITLES[head]} on {backbone}, COCO, {EPOCHS[length]} epochs"
    return Recipe(f"{head}_{backbone}_{length}", summary, config)


RECIPES = tuple(
    detection_recipe(head, family, size, length)
    for head, length in (("mask_rcnn", "1x"), ("mask_rcnn", "3x"), ("retinanet", "1x"))
    for family, sizes in SIZES.items()
    for size in sizes
)
