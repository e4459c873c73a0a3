"""The paper's segmenters on ADE20K: Semantic FPN on PVT in 80,000 updates, UPerNet on Swin in 160,000.

    inline train semantic_fpn_inline_pvt_tiny_80k --data-dir ADEChallengeData2016 --initial-checkpoint FILE

The file is of the backbone as `inline train pvt_tiny` or `inline convert` writes it; the paper's figures need one, and
without it training starts from random weights. Crops of 512 × 512 pixels, sixteen an update, AdamW at 2e-4 and 6e-5
down to zero by a polynomial. What the paper does not say is as the authors of the backbones have it: weight decay, the
power of the polynomial, and UPerNet's 1500 updates of warm-up.
"""

from __future__ import annotations

from inline_attention.engine.config import (
    DataSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    SegmentationSection,
    TaskSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.recipes.recipe import Recipe

SIZES = {"pvt": ("tiny", "small", "medium", "large"), "swin": ("tiny", "small", "base")}
TOTAL_BATCH, GPUS = 16, 8
EPOCHS_BETWEEN_EVALUATIONS = 6  # of 1263 updates each


def _config(
    backbone: str,
    segmentation: SegmentationSection,
    optimizer: OptimizerSection,
    schedule: ScheduleSection,
    updates: int,
) -> TrainConfig:
    return TrainConfig(
        task=TaskSection(name="segmentation"),
        model=ModelSection(name=backbone),
        data=DataSection(dataset="pairs", reduce_zero_label=True),
        segmentation=segmentation,
        optimizer=optimizer,
        schedule=schedule,
        training=TrainingSection(
            updates=updates,
            batch_size=TOTAL_BATCH // GPUS,
            total_batch_size=TOTAL_BATCH,
            validation_interval=EPOCHS_BETWEEN_EVALUATIONS,
        ),
    )


def semantic_fpn_recipe(size: str) -> Recipe:
    """Semantic FPN on a PVT of a size."""
    backbone = f"inline_pvt_{size}"
    config = _config(
        backbone,
        SegmentationSection(head="semantic_fpn"),
        OptimizerSection(lr=2e-4, lr_base_size=TOTAL_BATCH, weight_decay=1e-4),
        ScheduleSection(name="poly", decay_rate=0.9, warmup_epochs=0, min_lr=0.0),
        80_000,
    )
    return Recipe(f"semantic_fpn_{backbone}_80k", f"Semantic FPN on {backbone}, ADE20K, 80,000 updates", config)


def upernet_recipe(size: str) -> Recipe:
    """UPerNet on a Swin of a size."""
    backbone = f"inline_swin_{size}"
    config = _config(
        backbone,
        SegmentationSection(head="upernet"),
        OptimizerSection(lr=6e-5, lr_base_size=TOTAL_BATCH, weight_decay=0.01),
        ScheduleSection(name="poly", decay_rate=1.0, warmup_updates=1500, warmup_lr=6e-11, min_lr=0.0),
        160_000,
    )
    return Recipe(f"upernet_{backbone}_160k", f"UPerNet on {backbone}, ADE20K, 160,000 updates", config)


RECIPES = (*map(semantic_fpn_recipe, SIZES["pvt"]), *map(upernet_recipe, SIZES["swin"]))
