"""InLine-Swin-B fine-tuned at 384² on ImageNet-1K from its weights of 224², 30 epochs; no figure is published.

`inline train swin_base_384 --data-dir DIR --initial-checkpoint FILE`

The checkpoint is one of `inline train swin_base`. The warm-up starts at a thousandth of the learning rate, as it does
at 224²; the paper does not say.
"""

from __future__ import annotations

from dataclasses import replace

from inline_attention.recipes.imagenet import SWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "swin_base_384",
    "InLine-Swin-B fine-tuned at 384² on ImageNet-1K",
    total_batch_size=512,
    drop_path=0.5,
    schedule=replace(SWIN_SCHEDULE, warmup_epochs=5, warmup_lr=2e-8, min_lr=2e-7),
    epochs=30,
    lr=2e-5,
    weight_decay=1e-8,
    clip_grad=5.0,
    from_checkpoint=True,
)
