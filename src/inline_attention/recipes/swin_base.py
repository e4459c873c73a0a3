"""InLine-Swin-B at 224² on ImageNet-1K, 300 epochs: the paper reports 84.1 % top-1.

`inline train swin_base --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import SWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "swin_base",
    "InLine-Swin-B at 224² on ImageNet-1K",
    total_batch_size=512,
    drop_path=0.5,
    schedule=SWIN_SCHEDULE,
    clip_grad=5.0,
)
