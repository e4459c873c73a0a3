"""InLine-PVT-T at 224² on ImageNet-1K, 300 epochs: the paper reports 78.2 % top-1.

`inline train pvt_tiny --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import PVT_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "pvt_tiny",
    "InLine-PVT-T at 224² on ImageNet-1K",
    total_batch_size=1024,
    drop_path=0.1,
    schedule=PVT_SCHEDULE,
)
