"""InLine-PVT-M at 224² on ImageNet-1K, 300 epochs: the paper reports 83.2 % top-1.

`inline train pvt_medium --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import PVT_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "pvt_medium",
    "InLine-PVT-M at 224² on ImageNet-1K",
    total_batch_size=1024,
    drop_path=0.3,
    schedule=PVT_SCHEDULE,
    clip_grad=1.0,
)
