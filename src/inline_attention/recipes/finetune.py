"""Any checkpoint on a folder of your own pictures, one subfolder per class; what to expect depends on them.

`inline train finetune --data-dir DIR --initial-checkpoint FILE`

Another model than InLine-DeiT-T is chosen with `--model`. Lower layers learn more slowly than upper ones, and no
pictures are mixed: a small folder is learned in few epochs.
"""

from __future__ import annotations

from inline_attention.engine.config import (
    AugmentationSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.recipes.recipe import Recipe

RECIPE = Recipe(
    "finetune",
    "any checkpoint on a folder of your own pictures",
    TrainConfig(
        model=ModelSection(name="inline_deit_tiny", require_checkpoint=True),
        augmentation=AugmentationSection(mixup=0.0, cutmix=0.0),
        optimizer=OptimizerSection(lr=5e-4, lr_base_size=512, layer_decay=0.75),
        schedule=ScheduleSection(warmup_epochs=2, warmup_lr=5e-7, min_lr=5e-6),
        training=TrainingSection(epochs=20, batch_size=64, clip_grad=5.0),
    ),
)
