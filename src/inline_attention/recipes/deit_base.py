"""InLine-DeiT-B at 448² on ImageNet-1K, 300 epochs: the paper reports 82.3 % top-1.

`inline train deit_base --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import DEIT_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "deit_base",
    "InLine-DeiT-B at 448² on ImageNet-1K",
    total_batch_size=512,
    drop_path=0.1,
    schedule=DEIT_SCHEDULE,
    clip_grad=5.0,
)
