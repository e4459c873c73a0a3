"""What the paper's ImageNet-1K recipes have in common (arXiv 2412.06590, appendix), by family.

AdamW with weight decay 0.05, learning rate 5e-4 per 512 images, a cosine down to the minimum with every update,
RandAugment, erasing, mixup, CutMix and label smoothing are the defaults of `TrainConfig`. Batches are the paper's on
eight GPUs; on fewer, gradients are accumulated.
"""

from __future__ import annotations

from dataclasses import replace

from inline_attention.engine.config import (
    DataSection,
    EmaSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.models.published import PUBLISHED_TOP1
from inline_attention.recipes.recipe import Recipe

GPUS = 8

DEIT_SCHEDULE = ScheduleSection(warmup_epochs=20, warmup_lr=5e-7, min_lr=5e-6)
SWIN_SCHEDULE = DEIT_SCHEDULE
PVT_SCHEDULE = ScheduleSection(warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, cooldown_epochs=10)
CSWIN_SCHEDULE = replace(PVT_SCHEDULE, warmup_epochs=20)
CSWIN_EMA = EmaSection(enabled=True, decay=0.9996, decay_base_size=4096)


def imagenet_recipe(
    name: str,
    summary: str,
    *,
    total_batch_size: int,
    drop_path: float,
    schedule: ScheduleSection,
    epochs: int = 300,
    lr: float = 5e-4,
    weight_decay: float = 0.05,
    clip_grad: float | None = None,
    ema: EmaSection | None = None,
    from_checkpoint: bool = False,
) -> Recipe:
    """The recipe of `inline_NAME` on ImageNet-1K.

    Args:
        name: Of the model, without `inline_`.
        summary: What it trains, in a line.
        total_batch_size: Images per update.
        drop_path: Rate of stochastic depth at the last block.
        schedule: The family's.
        epochs: Without cool-down.
        lr: Learning rate per 512 images.
        weight_decay: Weight decay.
        clip_grad: Largest norm of the gradient.
        ema: Averaged weights.
        from_checkpoint: Fine-tune: refuse to start from random weights.
    """
    model = f"inline_{name}"
    config = TrainConfig(
        model=ModelSection(name=model, num_classes=1000, drop_path=drop_path, require_checkpoint=from_checkpoint),
        data=DataSection(workers=8),
        optimizer=OptimizerSection(lr=lr, lr_base_size=512, weight_decay=weight_decay),
        schedule=schedule,
        ema=ema or EmaSection(),
        training=TrainingSection(
            epochs=epochs,
            batch_size=total_batch_size // GPUS,
            total_batch_size=total_batch_size,
            clip_grad=clip_grad,
        ),
    )
    return Recipe(name, summary, config, PUBLISHED_TOP1.get(model))
