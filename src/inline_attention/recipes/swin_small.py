"""InLine-Swin-S at 224² on ImageNet-1K, 300 epochs: the paper reports 83.6 % top-1.

`inline train swin_small --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import SWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "swin_small",
    "InLine-Swin-S at 224² on ImageNet-1K",
    total_batch_size=1024,
    drop_path=0.3,
    schedule=SWIN_SCHEDULE,
    clip_grad=5.0,
)
