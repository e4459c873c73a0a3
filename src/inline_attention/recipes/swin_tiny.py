"""InLine-Swin-T at 224² on ImageNet-1K, 300 epochs: the paper reports 82.4 % top-1.

`inline train swin_tiny --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import SWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "swin_tiny",
    "InLine-Swin-T at 224² on ImageNet-1K",
    total_batch_size=1024,
    drop_path=0.2,
    schedule=SWIN_SCHEDULE,
    clip_grad=5.0,
)
