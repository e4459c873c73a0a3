"""A tiny InLine-DeiT on scikit-learn's handwritten digits, which are inside the package: under a minute on one core.

`inline train digits`

The 8×8 pictures are 16 tokens of 2×2 pixels. `--model softmax_deit_tiny` and `--model linear_deit_tiny` train its twins
by the same recipe, as `inline demo` does to compare them. Its settings were chosen for the twins to learn within that
time too, and by accuracy on the 360 validation pictures, for want of others: it is no measure of generalisation.
"""

from __future__ import annotations

from inline_attention.engine.config import (
    AugmentationSection,
    DataSection,
    LoggingSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.recipes.recipe import Recipe

RECIPE = Recipe(
    "digits",
    "a tiny InLine-DeiT on handwritten digits, within a minute on a CPU",
    TrainConfig(
        model=ModelSection(
            name="inline_deit_tiny",
            arguments={"patch_size": 2, "embed_dim": 64, "num_heads": 4, "depth": 3, "mlp_ratio": 2.0},
            num_classes=10,
            img_size=8,
            drop_path=0.0,
        ),
        data=DataSection(dataset="digits", workers=0, in_memory=True, crop_pct=1.0),
        # Digits are no longer themselves when flipped or mixed.
        augmentation=AugmentationSection(
            crop="padded",
            crop_padding=1,
            hflip=0.0,
            auto_augment=None,
            color_jitter=0.0,
            reprob=0.0,
            mixup=0.0,
            cutmix=0.0,
        ),
        optimizer=OptimizerSection(lr=5e-3, lr_base_size=None),
        schedule=ScheduleSection(warmup_epochs=4, warmup_lr=1e-5, min_lr=1e-5),
        loss=LossSection(smoothing=0.0),
        training=TrainingSection(epochs=60, batch_size=128, total_batch_size=128, amp="off", clip_grad=1.0),
        logging=LoggingSection(interval=5),
    ),
)
